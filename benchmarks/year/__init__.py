"""A year of many recurring jobs through a real server over HTTP, in accelerated time."""

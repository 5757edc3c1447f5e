// Keeps the page up to date, describes the marks in charts, sorts and filters tables, switches between light and dark.
const root = new URL(document.documentElement.dataset.root, location.href);
const fresh = document.getElementById("fresh");
const policy = window.trustedTypes?.createPolicy("zeus-bso", { createHTML: (text) => text });
const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
const QUICK = 2000, SLOW = 30000;
let wait = QUICK, timer = 0, heard = Date.now();

function age(instant) {
  const seconds = (Date.now() - Date.parse(instant)) / 1000;
  if (Math.abs(seconds) < 5) return "just now";
  const [size, name] = units.find(([least]) => Math.abs(seconds) >= least);
  const told = `${Math.floor(Math.abs(seconds) / size)}\u00a0${name}`;
  return seconds < 0 ? `in\u00a0${told}` : `${told}\u00a0ago`;
}

function tellAges() {
  for (const time of document.querySelectorAll("time.ago")) {
    const told = age(time.dateTime);
    if (time.textContent !== told) time.textContent = told;
  }
}

const LIVE = "[data-live]", live = () => document.querySelector(LIVE), lives = (page) => [...page.querySelectorAll(LIVE)];

function pathOf(element) {
  const place = [];
  for (; element && !element.matches(LIVE); element = element.parentElement) {
    if (element.id) return [`#${CSS.escape(element.id)}`, ...place].join(">");
    place.unshift(`:nth-child(${[...element.parentElement.children].indexOf(element) + 1})`);
  }
  return [LIVE, ...place].join(">");
}

function replace(text) {
  const page = new DOMParser().parseFromString(policy ? policy.createHTML(text) : text, "text/html");
  const olds = lives(document), news = lives(page);
  if (!news.length || news.length !== olds.length) return;
  olds.forEach((old, at) => replaceOne(old, news[at]));
  document.title = page.title;
}

function replaceOne(old, main) {
  const open = [...old.querySelectorAll("details[open]")].map((each) => each.id);
  const typed = [...old.querySelectorAll(":is(input, select)[id]")].map((each) => [each.id, each.value, each.checked]);
  const focused = old.contains(document.activeElement) ? pathOf(document.activeElement) : null;
  const across = old.querySelector(".scroll")?.scrollLeft, x = scrollX, y = scrollY;
  hide();
  old.replaceWith(document.adoptNode(main));
  for (const id of open) document.getElementById(id)?.setAttribute("open", "");
  for (const [id, value, checked] of typed) Object.assign(document.getElementById(id) ?? {}, { value, checked });
  const scroll = main.querySelector(".scroll");
  if (scroll && across) scroll.scrollLeft = across;
  arrange(main);
  if (focused) document.querySelector(focused)?.focus({ preventScroll: true });
  scrollTo(x, y);
}

async function poll() {
  try {
    const headers = { "If-None-Match": live().dataset.live };
    const answer = await fetch(location.href, { headers, cache: "no-store", signal: AbortSignal.timeout(10000) });
    if (answer.status === 401 || answer.status === 404) return location.reload();
    if (answer.status !== 304 && !answer.ok) throw new Error(answer.status);
    if (answer.status !== 304) replace(await answer.text());
    heard = Date.now();
    wait = QUICK;
    fresh.classList.remove("stale");
    if (fresh.textContent) fresh.textContent = "";
  } catch {
    wait = Math.min(wait * 2, SLOW);
    const since = new Date(heard).toLocaleTimeString();
    fresh.classList.add("stale");
    if (!fresh.textContent) fresh.textContent = `Stale since ${since}: the server does not answer`;
  }
  tellAges();
  again();
}

function again() {
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(poll, wait);
}

const marks = "a[aria-label], use[aria-label]";
let tip = null, on = null;

function hide() {
  tip?.remove();
  on?.classList.remove("on");
  tip = on = null;
}

function show(mark) {
  if (mark === on) return;
  hide();
  on = mark;
  mark.classList.add("on");
  tip = document.createElement("div");
  tip.id = "tip";
  tip.textContent = mark.getAttribute("aria-label");
  document.body.append(tip);
  const box = mark.getBoundingClientRect(), own = tip.getBoundingClientRect();
  const left = box.left + box.width / 2 - own.width / 2, above = box.top - own.height - 8;
  tip.style.left = `${Math.max(8, Math.min(left, innerWidth - own.width - 8))}px`;
  tip.style.top = `${above < 8 ? box.bottom + 8 : above}px`;
}

document.addEventListener("pointerover", (event) => {
  const mark = event.target.closest?.(`.plot :is(${marks})`);
  if (mark) show(mark.closest("a") ?? mark);
  else if (on && !on.closest(".plot").matches(":focus-visible")) hide();
});
document.addEventListener("focusout", hide);
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return hide();
  const plot = event.target.closest?.(".plot");
  if (!plot) return;
  if (event.key === "Enter" && on?.matches("a")) return location.assign(new URL(on.getAttribute("href"), document.baseURI));
  const all = [...plot.querySelectorAll(`:scope > :is(${marks})`)], at = all.indexOf(on);
  const next = { ArrowRight: at + 1, ArrowLeft: at < 0 ? all.length - 1 : at - 1, Home: 0, End: all.length - 1 }[event.key];
  if (next === undefined || !all.length) return;
  event.preventDefault();
  show(all[Math.max(0, Math.min(next, all.length - 1))]);
});

// Tables: chosen order by the table's id as [column, direction], and texts that filter them.
const orders = {};

function valueOf(row, column) {
  const cell = [...row.cells].flatMap((each) => Array(each.colSpan).fill(each))[column];
  const value = cell?.querySelector("data, time");
  const number = Number(value?.value ?? NaN);
  return value?.dateTime ?? (Number.isNaN(number) ? cell?.textContent.trim() ?? "" : number);
}

function order(table) {
  const [column, direction] = orders[table.id];
  const body = document.createElement("tbody");
  const rows = [...table.querySelectorAll("tr.run")].map((row) => [valueOf(row, column), row]);
  const known = (value) => typeof value === "number" || (value !== "" && value !== "—");
  rows.sort(([a], [b]) => known(b) - known(a)
    || direction * (typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b))));
  body.append(...rows.map(([, row]) => row));
  table.append(body);
  table.classList.add("sorted");
  [...table.tHead.rows[0].cells].forEach((head, at) => {
    if (at === column) head.ariaSort = direction > 0 ? "ascending" : "descending";
    else head.removeAttribute("aria-sort");
  });
}

function filter(field) {
  const words = field.value.toLowerCase().split(/\s+/).filter(Boolean), table = document.getElementById(field.dataset.filter);
  if (!table) return;
  for (const row of table.querySelectorAll("tr.run")) {
    const text = row.textContent.toLowerCase();
    row.classList.toggle("out", !words.every((word) => text.includes(word)));
  }
  table.classList.toggle("sorted", words.length > 0 || table.id in orders);
}

function arrange(part) {
  for (const table of part.querySelectorAll("table[data-sort]")) {
    for (const head of table.tHead.rows[0].cells) {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
    }
    if (orders[table.id]) order(table);
  }
  for (const field of part.querySelectorAll("[data-filter]")) {
    field.closest(".filter").hidden = false;
    filter(field);
  }
}

document.addEventListener("click", (event) => {
  const head = event.target.closest?.("table[data-sort] thead th");
  if (!head) return;
  const table = head.closest("table"), known = orders[table.id];
  // Numbers begin with the largest.
  const first = head.classList.contains("num") ? -1 : 1;
  orders[table.id] = [head.cellIndex, known?.[0] === head.cellIndex ? -known[1] : first];
  order(table);
});
document.addEventListener("input", (event) => {
  if (event.target.dataset.filter) filter(event.target);
});
arrange(document);

const theme = document.getElementById("theme");
theme.hidden = false;
theme.addEventListener("click", () => {
  const now = getComputedStyle(document.documentElement).colorScheme;
  const isDark = now === "dark" || (now !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  const chosen = isDark ? "light" : "dark";
  document.documentElement.dataset.theme = chosen;
  document.cookie = `zeus_bso_theme=${chosen}; path=${root.pathname}; max-age=31536000; samesite=lax`;
});

const knobs = document.querySelector("[data-knobs]");
knobs?.addEventListener("input", () => {
  if (!knobs.checkValidity()) return;
  history.replaceState(null, "", `?${new URLSearchParams(new FormData(knobs))}`);
  clearTimeout(timer);
  timer = setTimeout(poll, 100);
});

if (live()) {
  document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
  poll();
}

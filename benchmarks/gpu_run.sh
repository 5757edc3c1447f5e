#!/bin/bash
# One call of the hour on a GPU, without a network:
#   bash run.sh [--minutes 8] [--out DIR] [--work DIR] [--targets FILE] [--rehearse]
# Options after these go to `python -m benchmarks.recurrences hour`, such as --tasks resnet50 --recurrences 8.
# Resumes from gpu-state.tgz in --out, or beside this folder, and writes gpu-state.tgz, gpu-results.json and gpu-page.md
# into --out (default: beside this folder). --rehearse trains small models on a CPU with a simulated driver.
# Exit status 3: steps are left, run the same command again.
set -eu
began=$(date +%s)
here=$(cd "$(dirname "$0")" && pwd)
beside=$(dirname "$here")
minutes=8 out=$beside work=${TMPDIR:-/tmp}/gpu-bundle-work rehearse= targets=
while [ $# -gt 0 ]; do
    case $1 in
        --minutes) minutes=$2; shift 2 ;;
        --out) out=$2; shift 2 ;;
        --work) work=$2; shift 2 ;;
        --targets) targets=$(cd "$(dirname "$2")" && pwd)/$(basename "$2"); shift 2 ;;
        --rehearse) rehearse=1; shift ;;
        *) break ;;
    esac
done
mkdir -p "$work" "$out"
if command -v flock > /dev/null; then
    exec 9> "$work/lock"
    flock -w 20 9 || { echo "run.sh: another call uses $work: wait for its end" >&2; exit 1; }
fi

saved=$out/gpu-state.tgz
[ -f "$saved" ] || saved=$beside/gpu-state.tgz
state=$work/state
if [ -f "$saved" ]; then
    rm -rf "$state"
    mkdir -p "$state"
    tar -xzf "$saved" -C "$state"
fi

python=${PYTHON:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
packages=$work/packages-$version-$(cat "$here"/requirements.txt "$here"/wheels/zeus_plugins-*.whl | cksum | cut -d' ' -f1)
if [ ! -f "$packages/.complete" ]; then
    # Beside the existing packages: PyTorch and NumPy stay as they are. Without pip, the wheels are unpacked.
    rm -rf "$packages"
    mkdir -p "$packages"
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --find-links "$here/wheels" --no-deps \
        --no-compile --target "$packages" --requirement "$here/requirements.txt" zeus-plugins || {
        tag=cp${version/./}
        for wheel in "$here"/wheels/*-py3-none-*.whl "$here"/wheels/*-"$tag"-*.whl "$here"/wheels/*-abi3-*.whl; do
            "$python" -m zipfile -e "$wheel" "$packages"
        done
    }
    touch "$packages/.complete"
fi

export PYTHONPATH=$here/tree:$packages${PYTHONPATH:+:$PYTHONPATH}
export ZEUS_STATE_DIR=$work/zeus HF_HOME=$work/hf HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
if [ -n "$rehearse" ]; then
    export PYTHONPATH=$here/tree/tests/support/simulated_driver/path:$PYTHONPATH
    export SIMULATED_GPU=$work/computing
    set -- --shrink 8 --seconds 3 15 "$@"
fi
[ -z "$targets" ] || set -- --targets "$targets" "$@"
cd "$work"
# The process of this script becomes the measurement, which ends all that it started, also after kill -9.
exec "$python" -m benchmarks.recurrences hour --minutes "$minutes" --began "$began" --state "$state" --out "$out" "$@"

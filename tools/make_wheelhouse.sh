#!/usr/bin/env bash
# Gather as wheels what tools/gpu_check.sh needs on a machine without a network (Linux x86_64); torch and torchvision
# are the machine's own. Usage, where a package index is reached:
#   bash tools/make_wheelhouse.sh [FOLDER] [PYTHON_VERSION] [options]
# FOLDER (wheelhouse) is made anew, PYTHON_VERSION (3.12) is that of the other machine. Options:
#   --torchvision VERSION  with torchvision, for a machine that has none: 0.26.0 belongs to torch 2.11
#   --without NAME[==VERSION],...  without what the machine has too, and without what only that needs; a version says
#                          which (else that of tools/constraints.txt is taken as a guess)
#   --dry-run              only say what would be gathered
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
    echo "error: $1" >&2
    exit 1
}

names=() without="" torchvision="" dry_run=""
while [ $# -gt 0 ]; do
    case $1 in
        --torchvision | --without)
            [[ $# -gt 1 && $2 != -* ]] || fail "$1 needs a value"
            if [ "$1" = --without ]; then without+=",$2"; else torchvision=$2; fi
            shift
            ;;
        --dry-run) dry_run=1 ;;
        -*) fail "$1 is no option; see the head of $0" ;;
        *) names+=("$1") ;;
    esac
    shift
done
[ ${#names[@]} -le 2 ] || fail "at most a folder and a Python version are expected"
folder=${names[0]:-wheelhouse} version=${names[1]:-3.12}
[[ $version =~ ^3\.[0-9]+$ ]] || fail "$version is no Python version such as 3.12"

# Markers of requirements are judged by the Python that runs pip: the same version where there is one.
for python in ${PYTHON:-} "python$version" .venv/bin/python python3.12 python3.11 python3.10 python3 python ""; do
    [ -n "$python" ] || fail "no Python 3.10 or later with pip found; name it: PYTHON=/path/to/python bash $0"
    if "$python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then break; fi
done

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"$python" - "$scratch" "$without" <<'PYTHON'
"""What to gather; for the resolver, in place of what the machine has, wheels of those names with nothing in them."""
import re
import sys
import zipfile
from pathlib import Path

try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib

TESTS = ("pytest", "pytest-timeout", "hypothesis", "matplotlib")


def name(requirement):
    return re.sub(r"[-_.]+", "_", re.match(r"[\w.-]+", requirement)[0]).lower()


scratch, without = Path(sys.argv[1]), [word.strip() for word in sys.argv[2].split(",") if word.strip()]
lines = Path("tools/constraints.txt").read_text(encoding="utf-8").splitlines()
pins = {name(line): line for line in reversed(lines) if line[:1].isalnum()}
there = {"torch": "2.11.0", "torchvision": "0.26.0"}
for word in without:
    version = (word if "==" in word else pins.get(name(word), "==9999")).partition("==")[2]
    there[name(word)] = version.partition(";")[0].strip()
project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
extras = [r for group in project["project"]["optional-dependencies"].values() for r in group]
wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
wanted += [r for r in extras if name(r).replace("_", "-") in TESTS]
(scratch / "requirements.txt").write_text("".join(f"{r}\n" for r in wanted if name(r) not in there))
constraints = [line for line in lines if line[:1].isalnum() and name(line) not in there]
constraints += [f"{stub}=={version}+machine" for stub, version in there.items()]
(scratch / "constraints.txt").write_text("\n".join(constraints) + "\n")
(scratch / "there.txt").write_text("".join(f"{stub}\n" for stub in there))
(scratch / "deepspeed.txt").write_text("" if "deepspeed" in there else pins["deepspeed"])
for stub, version in there.items():
    info = f"{stub}-{version}+machine"
    about = f"Metadata-Version: 2.1\nName: {stub}\nVersion: {version}+machine\n"
    with zipfile.ZipFile(scratch / f"{info}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{info}.dist-info/METADATA", about)
        wheel.writestr(f"{info}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}.dist-info/RECORD", "")
PYTHON

if [ -n "$dry_run" ]; then
    echo "$folder, for Python $version on Linux x86_64, would hold wheels of these and of what they need:"
    sed 's/^/  /' "$scratch/requirements.txt"
    [ -z "$torchvision" ] || echo "  torchvision==$torchvision"
    echo "without what the machine has: $(paste -sd ' ' "$scratch/there.txt")"
    exit
fi

if [ -e "$folder" ]; then
    [ -z "$(find "$folder" -mindepth 1 ! -name '*.whl' -print -quit)" ] || fail "$folder holds more than wheels"
    rm -r "$folder"
fi
mkdir -p "$folder"
pip=("$python" -m pip --disable-pip-version-check)
target=(--only-binary=:all: --implementation cp --python-version "$version")
# pip takes each of these by its name alone, not for what is older too.
for glibc in $(seq -f 'manylinux_2_%g' 28 -1 5) manylinux2014 manylinux2010 manylinux1 linux; do
    target+=(--platform "${glibc}_x86_64")
done

if [ -s "$scratch/deepspeed.txt" ]; then
    echo "building DeepSpeed's wheel: the index has its source only"
    DS_BUILD_OPS=0 "${pip[@]}" wheel -q --no-deps -w "$folder" "$(cat "$scratch/deepspeed.txt")"
fi
echo "gathering the rest for Python $version with $("$python" --version)"
"${pip[@]}" download -q -d "$folder" "${target[@]}" --find-links "$scratch" --find-links "$folder" \
    -c "$scratch/constraints.txt" -r "$scratch/requirements.txt"
rm -f "$folder"/*+machine-py3-none-any.whl
if [ -n "$torchvision" ]; then
    "${pip[@]}" download -q -d "$folder" "${target[@]}" --no-deps "torchvision==$torchvision"
fi
du -a --apparent-size -k "$folder"/*.whl | sort -rn | awk '{sub(".*/", "", $2); printf "%7.1f MB  %s\n", $1 / 1000, $2}'
echo "$folder: $(ls "$folder" | wc -l) wheels, $(($(du -s --apparent-size -k "$folder" | cut -f 1) / 1024)) MiB"

# Sourced by quickstart.sh and test.sh: a virtual environment in .venv with this project in it.
# Usage, from the project's root: source tools/setup.sh; setup_venv [EXTRAS]. Sets $VENV.
# What is already installed (same pyproject.toml, same constraints, same extras) is not installed again.

VENV=$PWD/.venv

setup_fail() {
    echo "error: $1" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.10 python3 python; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
}

# A function: a sourced file given no arguments would see those of the script that sources it.
setup_venv() {
    local extras=${1:-} python wanted stamp
    if [ ! -x "$VENV/bin/python" ] || ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
        python=$(find_python)
        [ -n "$python" ] || setup_fail "no Python 3.10, 3.11 or 3.12 found; install one, or name it: PYTHON=/path/to/python bash $0"
        echo "making $VENV with $("$python" --version)"
        rm -rf "$VENV"
        "$python" -m venv "$VENV" || setup_fail "cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv"
    fi

    wanted="$(cat pyproject.toml tools/constraints.txt | cksum) $extras"
    stamp="$VENV/.dsclr-installed"
    if ! grep -qxF "$wanted" "$stamp" 2>/dev/null; then
        echo "installing dsclr${extras:+[$extras]} (the first time takes a few minutes: PyTorch is large)"
        "$VENV/bin/python" -m pip install --disable-pip-version-check -q -c tools/constraints.txt -e ".${extras:+[$extras]}" \
            || setup_fail "installing failed (see above); it needs a package registry (pip), about 8 GB of disk and Python 3.10 to 3.12. Run the same command again to go on."
        echo "$wanted" >>"$stamp"
    fi
}

#!/usr/bin/env bash
# Makes an environment with pycls and the given extras, or finds that there is one:
#     source dev/setup_env.sh EXTRA[,EXTRA...]
# sets PYTHON to its interpreter. The active virtual environment is used if there is one, else .venv, which is made if
# needed. Nothing is installed again as long as setup.py and the constraints stay the same.

pycls_setup() {
    local root extras base version stamp wanted
    root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
    extras="${1:?give the extras to install, e.g. digits}"
    base="${PYTHON:-python3}"
    if ! version="$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)"; then
        echo "setup: '$base' does not run; install Python 3.10 or newer, or set PYTHON to one" >&2
        return 2
    fi
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        echo "setup: '$base' is Python $version, at least 3.10 is needed; set PYTHON to a newer one" >&2
        return 2
    fi
    if [ -n "${VIRTUAL_ENV:-}" ]; then
        PYTHON="$VIRTUAL_ENV/bin/python"
        echo "setup: using the active environment $VIRTUAL_ENV"
    else
        PYTHON="$root/.venv/bin/python"
        if [ ! -x "$PYTHON" ]; then
            echo "setup: making $root/.venv with Python $version"
            if ! "$base" -m venv "$root/.venv"; then
                echo "setup: '$base -m venv' failed; on Debian or Ubuntu install python3-venv" >&2
                return 2
            fi
        else
            echo "setup: using $root/.venv"
        fi
    fi
    export PYTHON
    wanted="$(cat "$root/setup.py" "$root/requirements/constraints.txt" | cksum) $root"
    stamp="$("$PYTHON" -c 'import sys; print(sys.prefix)')/.pycls-$extras"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
        echo "setup: nothing to install"
        return 0
    fi
    echo "setup: installing pycls[$extras] with pinned versions"
    # torch first and by its exact version: a range would pull a CUDA build where a CPU one is at hand.
    "$PYTHON" -m pip install -q --disable-pip-version-check "$(grep '^torch==' "$root/requirements/constraints.txt")" \
        -c "$root/requirements/constraints.txt" || return 2
    "$PYTHON" -m pip install -q --disable-pip-version-check -e "$root[$extras]" -c "$root/requirements/constraints.txt" || return 2
    echo "$wanted" > "$stamp"
}

pycls_setup "$@"

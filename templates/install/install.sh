#!/bin/sh
# Installs @TITLE@ with its Reef harness. Everything goes below one folder; see README of the project, "harness install".
# The whole script is one braced group: a shell runs nothing of it before it has read the last line.
{
reef_install_find_python() {
  for reef_candidate in "${REEF_PYTHON:-}" python3 python3.13 python3.12 python3.11 python3.10 python3.9 python; do
    if [ -n "$reef_candidate" ] && command -v "$reef_candidate" >/dev/null 2>&1 &&
      "$reef_candidate" -I -c 'import sys; sys.exit(sys.version_info < (3, 9))' </dev/null >/dev/null 2>&1; then
      printf '%s\n' "$reef_candidate"
      return 0
    fi
  done
  return 1
}
reef_install_main() {
  umask 022
  if [ -z "${HOME:-}" ] && [ -z "${REEF_HARNESS_HOME:-}" ]; then
    echo "reef: HOME is not set" >&2
    return 1
  fi
  reef_python=$(reef_install_find_python) || {
    echo "reef: Python 3.9 or newer is missing; install python3, or name one with REEF_PYTHON" >&2
    return 1
  }
  "$reef_python" -I -c '@BOOTSTRAP@' <<'REEF_BUNDLE'
@BUNDLE@
REEF_BUNDLE
}
reef_install_main
exit $?
}

#!/usr/bin/env bash
# One packaging test per sub-command; tests/packaging/CMakeLists.txt names them.
set -euo pipefail

# Runs an example and asks for the one number it prints to be a finite one.
run_example() {
  local printed
  printed=$("$1")
  echo "$1: $printed"
  grep -Eq -- '-?[0-9]+\.[0-9]+' <<<"$printed"
  ! grep -Eiq 'nan|inf' <<<"$printed"
}

# symbols LIBRARY GOLDEN: the library exports exactly the listed names. LEAN_ACCEPT=1 rewrites the list.
symbols() {
  local library=$1 golden=$2 seen
  seen=$(nm -D --defined-only --demangle --format=posix "$library" | sed -E 's/ [A-Za-z]( [0-9a-f]+)*$//' | LC_ALL=C sort -u)
  if [[ ${LEAN_ACCEPT:-} == 1 ]]; then
    printf '%s\n' "$seen" >"$golden"
  fi
  diff -u "$golden" <(printf '%s\n' "$seen") ||
    { echo "exported symbols changed: if meant, repeat with LEAN_ACCEPT=1 and note it in CHANGELOG.md"; return 1; }
}

# install CMAKE BUILD PREFIX: into an empty prefix.
install_tree() {
  rm -rf "$3"
  "$1" --install "$2" --prefix "$3"
}

# command PREFIX: the installed command starts.
command_starts() {
  "$1/bin/lean" --help
}

# find_package CMAKE EXAMPLES PREFIX DIR: a CMake project elsewhere finds, builds and runs.
find_package() {
  rm -rf "$4" && mkdir -p "$4"
  cp -r "$2" "$4/source"
  "$1" -S "$4/source" -B "$4/build" -DCMAKE_PREFIX_PATH="$3" -DCMAKE_BUILD_TYPE=Release
  "$1" --build "$4/build"
  run_example "$4/build/decode_cpp"
  run_example "$4/build/shared_prefix"
  run_example "$4/build/decode_c"
}

# pkg_config EXAMPLES PREFIX DIR: two compiler lines do the same.
pkg_config() {
  rm -rf "$3" && mkdir -p "$3"
  local pc flags
  pc=$(dirname "$(find "$2" -name lean_attention.pc)")
  export PKG_CONFIG_PATH=$pc
  read -ra flags <<<"$(pkg-config --cflags --libs lean_attention)"
  local rpath
  rpath=-Wl,-rpath,$(pkg-config --variable=libdir lean_attention)
  (cd "$3" && "${CXX:-c++}" -std=c++20 "$1/decode.cpp" "${flags[@]}" "$rpath" -o decode_cpp &&
    "${CC:-cc}" -std=c11 "$1/decode.c" "${flags[@]}" "$rpath" -o decode_c)
  run_example "$3/decode_cpp"
  run_example "$3/decode_c"
}

command=$1
shift
case $command in
  symbols | find_package | pkg_config) "$command" "$@" ;;
  install) install_tree "$@" ;;
  command) command_starts "$@" ;;
  *) echo "packaging.sh: unknown test $command" >&2; exit 2 ;;
esac

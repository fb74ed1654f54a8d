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

# not_built CMAKE SOURCE DIR: a build of which nothing was built yet says so, and nothing is copied.
not_built() {
  local said
  rm -rf "$3"
  "$1" -S "$2" -B "$3/build" -DLEAN_TESTS=OFF >"$3.log"
  if said=$("$1" --install "$3/build" --prefix "$3/prefix" 2>&1); then
    echo "it went well: $said"
    return 1
  fi
  echo "$said"
  [[ $said == *"liblean_attention.so"*" is not built"*"--component"* && ! -e $3/prefix ]]
}

# components CMAKE BUILD PREFIX: the command can be had without the library, as after `make demo`.
components() {
  rm -rf "$3"
  "$1" --install "$2" --prefix "$3" --component command
  [[ $(cd "$3" && find . -type f) == ./bin/lean ]]
  "$1" --install "$2" --prefix "$3" --component library
  [[ -e $3/include/lean/lean.hpp ]]
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
  run_example "$4/build/tensor_parallel"
  run_example "$4/build/context_parallel"
  run_example "$4/build/serving_loop"
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
  not_built | components) "$command" "$@" ;;
  command) command_starts "$@" ;;
  *) echo "packaging.sh: unknown test $command" >&2; exit 2 ;;
esac

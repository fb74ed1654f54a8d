#!/usr/bin/env bash
# Puts ONNX Runtime's C header into a folder, and that of C++ for the example of a host, from Debian's package libonnxruntime-dev: nothing is installed, and apt's own lists
# stay as they are. No Python package has it. Where there is no apt-get, it comes from ONNX Runtime's repository by git.
# Usage: tools/onnxruntime_headers.sh FOLDER     then cmake -DLEAN_ORT=ON -DLEAN_ORT_INCLUDE=FOLDER
set -euo pipefail
[[ $# == 1 ]] || {
  echo "usage: tools/onnxruntime_headers.sh FOLDER" >&2
  exit 2
}
folder=$1
suite=trixie  # the first with an interface that is new enough, 21
tag=v1.22.0   # of the repository

say() { echo "onnxruntime_headers: $*"; }

if [[ -f $folder/onnxruntime_c_api.h && -f $folder/onnxruntime_cxx_api.h ]]; then
  say "$folder has them"
  exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
if ! command -v apt-get >/dev/null; then
  say "$tag of github.com/microsoft/onnxruntime into $folder"
  git clone --quiet --depth 1 --branch "$tag" --filter=blob:none --sparse https://github.com/microsoft/onnxruntime "$work/source"
  git -C "$work/source" sparse-checkout set include/onnxruntime/core/session
  mkdir -p "$folder"
  cp "$work"/source/include/onnxruntime/core/session/onnxruntime_{*c_api,cxx_*,float16}.h "$folder/"
  cp "$work"/source/LICENSE "$folder/COPYRIGHT"
  exit 0
fi
mkdir -p "$work"/{lists,cache}/partial "$work"/cache/archives/partial

# The mirror that this machine is configured with, in either format of apt's sources.
mirror=$(find /etc/apt -name '*.sources' -o -name '*.list' | xargs -r sed -nE \
  's/^URIs: *([^ ]*\/debian)\/? *$/\1/p; s/^deb +(\[[^]]*\] +)?([^ ]*\/debian)\/? .*/\2/p' | head -n 1)
mirror=${mirror:-http://deb.debian.org/debian}
printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nArchitectures: amd64\nSigned-By: %s\n' \
  "$mirror" "$suite" /usr/share/keyrings/debian-archive-keyring.gpg >"$work/debian.sources"
apt=(apt-get -qq -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o Dir::Etc::sourcelist="$work/debian.sources"
  -o Dir::Etc::sourceparts=- -o Acquire::Languages=none)
if [[ $(id -u) == 0 ]]; then
  apt+=(-o APT::Sandbox::User=root)
fi

say "libonnxruntime-dev of Debian $suite into $folder"
"${apt[@]}" update
(cd "$work" && "${apt[@]}" download libonnxruntime-dev >/dev/null && dpkg -x libonnxruntime-dev_*.deb package)
mkdir -p "$folder"
cp "$work"/package/usr/include/onnxruntime/onnxruntime_{c_api,cxx_api,cxx_inline,float16}.h "$folder/"
cp "$work"/package/usr/share/doc/libonnxruntime-dev/copyright "$folder/COPYRIGHT"

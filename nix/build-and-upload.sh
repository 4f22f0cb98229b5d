# build-and-upload [DIR] [OPTION]...: build the kernel of DIR (default: here) with Nix, then `kernel-builder upload` it.
# The kernel is the default package of the flake in DIR, or the package named like DIR of a flake above it.
directory=$(realpath "${1:-.}")
[ $# = 0 ] || shift
root=$directory
until [ -e "$root/flake.nix" ]; do
    [ "$root" != / ] || { echo "error: $directory: there is no flake.nix in it or above it" >&2; exit 2; }
    root=$(dirname "$root")
done
attribute=default
[ "$root" = "$directory" ] || attribute=$(basename "$directory")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
nix --extra-experimental-features 'nix-command flakes' build "$root#$attribute" --out-link "$work/bundle"
python3 -m kernel_builder.nix copy "$work/bundle" "$directory/build"
python3 -m kernel_builder upload "$directory" "$@"

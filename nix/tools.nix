# The command line as programs of the flake.
{ builder, pkgs, python, run, stdenv, ... }:
let
  script = name: text: run name {
    text = "#!${stdenv.shell}\nset -euo pipefail\n${text}";
    passAsFile = [ "text" ];
    buildCommand = "mkdir -p $out/bin; cp $textPath $out/bin/${name}; chmod 755 $out/bin/${name}";
  };
  # Puts packages where `kernel-builder build` would; what else is in `build` stays.
  copy = bundle: directory: ''
    mkdir -p "${directory}/build"
    for package in "${bundle}"/*; do
      target="${directory}/build/$(basename "$package")"
      rm -rf "$target.new"
      cp -rL "$package" "$target.new"
      chmod -R u+w "$target.new"
      rm -rf "$target"
      mv "$target.new" "$target"
    done
  '';
in rec {
  kernel-builder = script "kernel-builder" ''
    export PATH=${stdenv.cc}/bin:${stdenv.cc.bintools}/bin:${pkgs.ninja}/bin:${pkgs.git}/bin:$PATH
    export PYTHONPATH=${builder} PYTHONDONTWRITEBYTECODE=1
    exec ${python}/bin/python3 -m kernel_builder "$@"
  '';
  build-and-copy = bundle: script "build-and-copy" (copy bundle ".");
  # build-and-upload [DIR] [OPTION]...: the flake at or above DIR has the kernel, as its default or by DIR's name.
  build-and-upload = script "build-and-upload" ''
    directory=$(realpath "''${1:-.}")
    [ $# = 0 ] || shift
    root=$directory
    until [ -e "$root/flake.nix" ]; do
      [ "$root" != / ] || { echo "error: $directory: there is no flake.nix in it or above it" >&2; exit 2; }
      root=$(dirname "$root")
    done
    [ "$root" = "$directory" ] && attribute=default || attribute=$(basename "$directory")
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    nix --extra-experimental-features 'nix-command flakes' build "$root#$attribute" --out-link "$work/bundle"
    ${copy "$work/bundle" "$directory"}
    ${kernel-builder}/bin/kernel-builder upload "$directory" "$@"
  '';
}

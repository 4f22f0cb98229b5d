# A stand-in for nixpkgs: exactly the attributes that the flake uses, made from this machine's tools.
# tests/system/nix/conftest.py writes their paths to `machine.json`.
{ system, config }:
let
  machine = builtins.fromJSON (builtins.readFile ./machine.json);
  mkDerivation =
    attributes:
    derivation (
      {
        inherit system;
        builder = "/bin/bash";
        args = [ ./builder.sh ];
        stdenv = ./stdenv;
        outputs = [ "out" ]; # `nix develop` looks for it
      }
      // attributes
    );
in
{
  stdenv = {
    inherit mkDerivation;
    shell = "/bin/bash";
    cc = {
      outPath = "/usr";
      bintools = "/usr";
      cc.lib = "/usr";
      libc = "/usr";
    };
  };
  python3 = {
    inherit (machine) pythonVersion;
    outPath = mkDerivation {
      name = "python3";
      buildCommand = ''
        mkdir -p $out/bin
        printf '#!/bin/sh\nexec ${machine.python} -s "$@"\n' > $out/bin/python3
        chmod 755 $out/bin/python3
      '';
    };
    pkgs.torch.version = machine.torchVersion;
    # The environment has all of these packages. A request for any other package is an evaluation error.
    withPackages =
      choose:
      builtins.deepSeq (choose {
        numpy = null;
        pip = null;
        pytest = null;
        torch = null;
      }) machine.environment;
  };
  ninja = machine.environment;
  git = "/usr";
  cacert = mkDerivation {
    name = "cacert";
    buildCommand = ''
      mkdir -p $out/etc/ssl/certs
      ln -s ${machine.certificates} $out/etc/ssl/certs/ca-bundle.crt
    '';
  };
  autoPatchelfHook = mkDerivation {
    name = "auto-patchelf-hook";
    buildCommand = ''
      mkdir -p $out/nix-support
      echo 'autoPatchelf() { :; }' > $out/nix-support/setup-hook
    '';
  };
}

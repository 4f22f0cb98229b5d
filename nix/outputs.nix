# What a flake offers of one kernel on one system, under the names that the public builder's flakes have.
{ steps, kernel }: with builtins;
let
  inherit (steps) builder dependencies libraries pkgs python run stdenv;
  inherit (kernel) packages variants;
  inherit (kernel.build.general) name;
  byVariant = make: listToAttrs (map (variant: { inherit (variant) name; value = make variant; }) variants);
  script = name: text: run name {
    passAsFile = [ "text" ];
    text = ''
      #!${stdenv.shell}
      set -euo pipefail
      export PATH=${stdenv.cc}/bin:${stdenv.cc.bintools}/bin:${python}/bin:${pkgs.ninja}/bin:${pkgs.git}/bin:$PATH
      export PYTHONPATH=${builder} PYTHONDONTWRITEBYTECODE=1 LIBRARY_PATH=${libraries}
    '' + text;
    buildCommand = "mkdir -p $out/bin; cp $textPath $out/bin/${name}; chmod 755 $out/bin/${name}";
  };
  kernel-builder = script "kernel-builder" ''exec python3 -m kernel_builder "$@"'';

  # Torch for shells and tests: nixpkgs' where it serves the stable ABI, else Torch's own wheels.
  hasTorch = compareVersions python.pkgs.torch.version "2.10" >= 0;
  withTorch = {
    nativeBuildInputs = [ kernel-builder pkgs.ninja pkgs.git
      (if hasTorch then python.withPackages (packages: with packages; [ numpy pytest torch ]) else python) ];
    PYTHONPATH = if hasTorch then dependencies else "${steps.installed "torch"}:${dependencies}";
  };
  shell = variant:
    let inherit (kernel.toolchain variant) cudaHome trees;
    in run "${name}-${variant.name}-shell" (withTorch // {
      # For `kernel-builder build` in the shell: what `nix build` compiles with, and so the same bytes.
      KERNEL_BUILDER_TREES = run "toolchains" { buildCommand = concatStringsSep "\n"
        ([ "mkdir $out" ] ++ map (kind: "ln -s ${trees.${kind}} $out/${kind}") (attrNames trees)); };
      ${if cudaHome == null then null else "CUDA_HOME"} = cudaHome;
      buildCommand = "echo 'error: this is for `nix develop`' >&2; exit 1";
    });
  shells = byVariant shell;
  first = shells.${(head (filter (variant: variant.backend == "cuda") variants ++ variants)).name};
  tests = run "${name}-cpu-tests" (withTorch // { buildCommand = ''
    cp -r ${kernel.path} ${name}
    chmod -R u+w ${name}
    rm -rf ${name}/build
    cp -r ${kernel.bundle} ${name}/build
    HOME=$PWD python3 -m pytest -p no:cacheprovider ${name}/tests
    touch $out
  ''; });
in {
  # Sets of packages are packages, too, as `nix flake check` asks: `.#redistributable.VARIANT` is one variant.
  packages = rec {
    inherit kernel-builder;
    bundle = kernel.bundle // { inherit (kernel) variant; variants = attrNames packages; };
    default = bundle;
    redistributable = bundle // packages;
    backendBundle = bundle
      // listToAttrs (map ({ backend, ... }: { name = backend; value = kernel.backendBundle backend; }) variants);
    build-and-copy = script "build-and-copy" "python3 -m kernel_builder.nix copy ${bundle} build";
    build-and-upload = script "build-and-upload" (readFile ./build-and-upload.sh);
  };
  devShells = shells // { default = first; devShells = first // shells; };
  checks = { ${name} = kernel.bundle; }
    // (if any (variant: variant.backend == "cpu") variants then { "${name}-cpu-tests" = tests; } else { });
}

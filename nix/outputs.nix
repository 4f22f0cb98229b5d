# What a flake offers of one kernel on one system, under the names that the public builder's flakes have.
{ steps, kernel }: with builtins;
let
  inherit (steps) dependencies pkgs python run;
  inherit (kernel) bundle build packages variants;
  inherit (build.general) name;
  tools = import ./tools.nix steps;
  byName = make: listToAttrs (map (variant: { inherit (variant) name; value = make variant; }) variants);

  # Torch for shells and tests: nixpkgs' where it serves the stable ABI, else Torch's own wheels.
  hasTorch = compareVersions python.pkgs.torch.version "2.10" >= 0;
  withTorch = {
    nativeBuildInputs = [ tools.kernel-builder pkgs.ninja pkgs.git
      (if hasTorch then python.withPackages (packages: with packages; [ numpy pytest torch ]) else python) ];
    PYTHONPATH = if hasTorch then "${dependencies}" else "${steps.installed "torch"}:${dependencies}";
  };
  shell = variant:
    let inherit (kernel.toolchain variant) cudaHome trees;
    in run "${name}-${variant.name}-shell" (withTorch // {
      # For `kernel-builder build` in the shell: what `nix build` compiles with, and so the same bytes.
      KERNEL_BUILDER_TREES = run "toolchains" {
        buildCommand = concatStringsSep "\n"
          ([ "mkdir $out" ] ++ map (kind: "ln -s ${trees.${kind}} $out/${kind}") (attrNames trees));
      };
      buildCommand = "echo 'error: this is for `nix develop`' >&2; exit 1";
    } // (if cudaHome == null then { } else { CUDA_HOME = cudaHome; }));
  shells = byName shell;
  first = shells.${(head (filter (variant: variant.backend == "cuda") variants ++ variants)).name};

  tests = run "${name}-cpu-tests" (withTorch // {
    buildCommand = ''
      cp -r ${kernel.path} ${name}
      chmod -R u+w ${name}
      rm -rf ${name}/build
      cp -r ${bundle} ${name}/build
      HOME=$PWD python3 -m pytest -p no:cacheprovider ${name}/tests
      touch $out
    '';
  });
in {
  # Sets of packages are packages, too, as `nix flake check` asks: `.#redistributable.VARIANT` is one variant.
  packages = rec {
    bundle = kernel.bundle // { inherit (kernel) variant; variants = attrNames packages; };
    default = bundle;
    redistributable = bundle // packages;
    backendBundle = bundle // listToAttrs (map ({ backend, ... }: { name = backend; value = kernel.backendBundle backend; }) variants);
    build-and-copy = tools.build-and-copy bundle;
    inherit (tools) build-and-upload kernel-builder;
  };
  devShells = shells // { default = first; devShells = first // shells; };
  checks = { ${name} = bundle; }
    // (if packages ? "torch-cpu" || any (variant: variant.backend == "cpu") variants then { "${name}-cpu-tests" = tests; } else { });
}

# The outputs of one kernel's flake on one system, named as in the public builder's flakes.
{ steps, kernel, pythonCheckInputs, pythonNativeCheckInputs }: with builtins;
let
  inherit (steps) builder dependencies libraries pkgs python run stdenv;
  inherit (kernel) bundleOf variants;
  inherit (kernel.build) general;
  inherit (general) name;
  byVariant = make: listToAttrs (map (variant: { inherit (variant) name; value = make variant; }) variants);
  ofBackend = backend: filter (variant: variant.backend == backend) variants;
  # Backend -> its first variant: the one for the newest Torch and the oldest CUDA.
  firsts = listToAttrs (map (variant: { name = variant.backend; value = variant; }) variants);
  first = firsts.cuda or (head variants);

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

  # Torch for shells and tests: from nixpkgs if it is 2.10 or later, which has the stable ABI, else Torch's own wheels.
  hasTorch = compareVersions python.pkgs.torch.version "2.10" >= 0;
  testPython = python.withPackages (packages:
    pythonCheckInputs packages ++ (if hasTorch then with packages; [ numpy pytest torch ] else [ ]));
  testPath = if hasTorch then dependencies else "${steps.installed "torch"}:${dependencies}";
  # Variables for Python: `import` finds the first variant, `get_kernel` the variant that fits the machine.
  finding = variants:
    let repository = general.hub.repo-id or null;
    in "export PYTHONPATH=${bundleOf variants}/${(head variants).name}:${testPath}\n"
      + (if repository == null then "" else "export LOCAL_KERNELS=${repository}=${bundleOf variants}\n");
  shell = variant: attributes: run "${name}-${variant.name}-shell" ({
    nativeBuildInputs = [ kernel-builder pkgs.ninja pkgs.git testPython ] ++ pythonNativeCheckInputs python.pkgs;
    PYTHONPATH = testPath;
    buildCommand = "echo 'error: this is for `nix develop`' >&2; exit 1";
  } // attributes);
  devShells = byVariant (variant: shell variant {
    # `kernel-builder build` in the shell has the toolchain of `nix build`, and so gives the same bytes.
    KERNEL_BUILDER_TREES = steps.directory "toolchains" "ln -s" (kernel.toolchain variant).trees;
  });
  testShells = byVariant (variant: shell variant { shellHook = finding [ variant ]; });
  test = variants: script "ci-test" (''
    export PATH=${testPython}/bin:$PATH project=${kernel.path} bundle=${bundleOf variants}
  '' + finding variants + readFile ./ci-test.sh);
  # `nix flake check` requires that a set of packages is itself a package: `.#redistributable` is the bundle, and
  # `.#redistributable.VARIANT` one variant.
  packages = rec {
    inherit kernel-builder;
    bundle = kernel.bundle // { inherit (kernel) variant; variants = map (variant: variant.name) variants; };
    default = bundle;
    redistributable = bundle // byVariant (variant: bundleOf [ variant ]);
    backendBundle = bundle // mapAttrs (backend: _: bundleOf (ofBackend backend)) firsts;
    ci = bundleOf (attrValues firsts);
    backendCi = ci // mapAttrs (_: variant: bundleOf [ variant ]) firsts;
    ci-test = test [ first ];
    ciTests = ci-test // byVariant (variant: test [ variant ]);
    kernels = script "kernels" ''exec python3 -c 'from kernels.cli import main; main()' "$@"'';
    build-and-copy = script "build-and-copy" "python3 -m kernel_builder.nix copy ${bundle} build";
    build-and-upload = script "build-and-upload" (readFile ./build-and-upload.sh);
  };
in {
  inherit packages;
  # `nix flake check` refuses lists in `packages`; `nix eval .#variants` finds them here.
  legacyPackages = rec { inherit (packages.bundle) variants; archVariants = variants; };
  devShells = devShells // {
    default = devShells.${first.name};
    test = testShells.${first.name};
    devShells = devShells.${first.name} // devShells;
    testShells = testShells.${first.name} // testShells;
  };
  # Skipped tests alone show nothing. Tests of a kernel that loads others would need these, and are left out.
  checks = { ${name} = kernel.bundle; } // (if firsts ? cpu && !(general ? kernel-depends) then {
    "${name}-cpu-tests" = run "${name}-cpu-tests" { buildCommand = ''
      HOME=$PWD ${test (ofBackend "cpu")}/bin/ci-test -m "" -rs | tee log
      case $(tail -n 1 log) in *passed*) ;; *skipped*) echo "error: every test of ${name} was skipped"; exit 1 ;; esac
      touch $out
    ''; };
  } else { });
}

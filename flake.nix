{
  description = "Compute kernels for PyTorch: from build.toml to every binary that the Kernel Hub asks for";
  inputs.nixpkgs.url = "github:NixOS/nixpkgs/nixos-25.05";

  outputs = { self, nixpkgs }: with builtins;
    let
      named = make: names: listToAttrs (map (name: { inherit name; value = make name; }) names);
      merged = foldl' (all: more: all // more) { };
      # The commit of builder or sources for the packages' metadata; empty if the flake is not in a repository.
      commitOf = flake:
        if flake ? rev then { commit = flake.rev; dirty = false; }
        else if flake ? dirtyRev then { commit = replaceStrings [ "-dirty" ] [ "" ] flake.dirtyRev; dirty = true; }
        else { };
      systems = named (system: import ./nix/steps.nix {
        inherit system;
        commit = commitOf self;
        pkgs = import nixpkgs { inherit system; config.allowUnfree = true; }; # inputs of a project's tests may be
      }) [ "x86_64-linux" "aarch64-linux" ];

      # The public builder's function of this name takes more arguments; they are ignored.
      genKernelFlakeOutputs = { path, self ? { }, pythonCheckInputs ? _: [ ], pythonNativeCheckInputs ? _: [ ], ... }:
        let
          outputs = mapAttrs (_: steps: import ./nix/outputs.nix {
            inherit pythonCheckInputs pythonNativeCheckInputs steps;
            kernel = steps.kernel { inherit path; commit = commitOf self; };
          }) systems;
        in named (name: mapAttrs (_: each: each.${name}) outputs) [ "packages" "legacyPackages" "devShells" "checks" ];

      kernels = named (name: genKernelFlakeOutputs { inherit self; path = ./kernels + "/${name}"; })
        (filter (name: pathExists (./kernels + "/${name}/build.toml")) (attrNames (readDir ./kernels)));
      each = make: mapAttrs (system: _: merged (attrValues (mapAttrs (make system) kernels))) systems;
    in {
      lib = { inherit genKernelFlakeOutputs; genFlakeOutputs = genKernelFlakeOutputs; };
      packages = mapAttrs (system: packages: packages // {
        default = systems.${system}.directory "kernels" "ln -s" (intersectAttrs kernels packages);
      }) (each (system: name: outputs:
        let
          inherit (outputs.packages.${system}) build-and-upload bundle kernel-builder redistributable;
          single = variant: { name = "${name}-${variant}"; value = redistributable.${variant}; };
        in { inherit build-and-upload kernel-builder; ${name} = bundle; } // listToAttrs (map single bundle.variants)));
      # A kernel's shells have its name; the others are of the last kernel.
      devShells = each (system: name: outputs:
        let
          shells = removeAttrs outputs.devShells.${system} [ "devShells" "test" "testShells" ];
          own = shell: { name = if shell == "default" then name else "${name}-${shell}"; value = shells.${shell}; };
        in shells // listToAttrs (map own (attrNames shells)));
      checks = each (system: name: outputs: outputs.checks.${system});
    };
}

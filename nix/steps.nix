# The derivations of a build on one system. kernel_builder/nix.py does the work of a step; this file defines its inputs.
{ pkgs, system, commit }: with builtins;
let
  lock = fromJSON (readFile ../kernel_builder/toolchain/lock.json);
  wheels = fromJSON (readFile ./python.json);
  ofCuda = fromTOML (readFile ../kernel_builder/backends/cuda/cuda.toml);
  variantsOf = import ./matrix.nix {
    inherit ofCuda system;
    matrix = fromTOML (readFile ../kernel_builder/config/matrix.toml);
  };
  # An attribute of nixpkgs, or null if this release lacks it. In some releases a removed attribute throws an error.
  optional = name: let found = tryEval (pkgs.${name} or null); in if found.success then found.value else null;
  stdenv = if optional "gcc13Stdenv" == null then pkgs.stdenv else pkgs.gcc13Stdenv; # nvcc 13.0 supports GCC up to 15
  python = pkgs.python3;

  when = condition: value: if condition then value else { };
  run = name: attributes:
    stdenv.mkDerivation ({
      name = concatStringsSep "-" (filter isString (split "[^A-Za-z0-9._-]+" name));
      PYTHONDONTWRITEBYTECODE = 1; # without a sandbox, root would write bytecode into the store
    } // attributes);
  # A directory of named entries, as links ("ln -s") or as copies ("cp -r").
  directory = name: command: entries: run name { buildCommand = concatStringsSep "\n"
    ([ "mkdir $out" ] ++ attrValues (mapAttrs (entry: from: "${command} ${from} $out/${entry}") entries)); };
  # The listed files of a directory, and everything below listed directories.
  subset = name: root: listed:
    let
      below = directory: file: substring 0 (stringLength directory + 1) file == "${directory}/";
      keep = file: type: baseNameOf file != "__pycache__"
        && any (one: one == file || below one file || (type == "directory" && below file one)) listed;
      start = stringLength (toString root) + 1;
    in path { inherit name; path = root; filter = file: keep (substring start (stringLength file) file); };
  # Whether a file of a directory is a symbolic link, or below one.
  isLinked = root: file: file != "." && (((readDir (dirOf (root + "/${file}"))).${baseNameOf file} or null) == "symlink"
    || isLinked root (dirOf file));
  # The symbolic links below a directory; none below a file.
  linksBelow = root: file:
    let
      kind = if file == "." then null else (readDir (dirOf (root + "/${file}"))).${baseNameOf file} or null;
      entries = readDir (root + "/${file}");
      below = entry: let inner = "${file}/${entry}"; in if entries.${entry} == "symlink" then [ inner ] else linksBelow root inner;
    in if kind == "directory" then concatMap below (attrNames entries) else [ ];
  # As `subset`, and files that are links, or reached by them, become regular files: the links lead out of the directory.
  sources = name: root: listed:
    let
      linked = filter (isLinked root) listed ++ concatMap (linksBelow root) (filter (file: !isLinked root file) listed);
      rest = subset name root (filter (file: !isLinked root file) listed);
      add = file: "rm -f $out/${file}; install -D -m 644 ${toFile (baseNameOf file) (readFile (root + "/${file}"))} $out/${file}";
    in if linked == [ ] then rest else run name { buildCommand = concatStringsSep "\n"
      ([ "cp -r ${rest} $out; chmod -R u+w $out" ] ++ map add linked); };
  # Files of this repository with the bytecode of the builder's: else each step would compile that, which takes .5 s.
  withBytecode = name: listed: run name {
    nativeBuildInputs = [ python ];
    buildCommand = ''
      cp -r ${subset name ../. listed} $out
      chmod -R u+w $out
      ${compileall} -x '/templates/|/kernels/' $out
    '';
  };
  compileall = "python3 -m compileall -q --invalidation-mode unchecked-hash"; # all files in the store have one time
  # The builder's import path. `init` reads the kit through a link in kernel_builder/templates.
  builder =
    let
      own = [ "aot" "emulator" "format" "sandbox" ];
      root = withBytecode "kernel-builder" ([ "kernel_builder" "kernels/kit" ]
        ++ map (name: "packages/kernel-${name}/kernel_${name}") own);
      paths = map (name: "${root}/packages/kernel-${name}") own;
    in concatStringsSep ":" ([ root ] ++ paths ++ [ dependencies ]);
  libraries = "${stdenv.cc.cc.lib}/lib:${stdenv.cc.libc}/lib"; # nixpkgs' wrapper of g++ does not print these directories
  step = name: program: spec: attributes: run name ({
    spec = toJSON spec;
    passAsFile = [ "spec" ];
    nativeBuildInputs = [ python ];
    PYTHONPATH = builder;
    LIBRARY_PATH = libraries;
    buildCommand = "python3 -m kernel_builder.nix ${program} $specPath $out";
  } // attributes);
  # Programs from wheels need nixpkgs' C library and interpreter.
  patched = attributes: attributes // {
    nativeBuildInputs = [ python pkgs.autoPatchelfHook ];
    buildInputs = [ stdenv.cc.cc.lib ];
    autoPatchelfIgnoreMissingDeps = [ "*" ];
    buildCommand = attributes.buildCommand + "\nchmod -R u+w $out; autoPatchelf $out";
  };

  # Only these derivations use the network. PIP_INDEX_URL names the index, as for pip. Nix checks the hash.
  fixed = sha256: {
    outputHashMode = "flat";
    outputHashAlgo = "sha256";
    outputHash = sha256;
    impureEnvVars = [ "PIP_INDEX_URL" "http_proxy" "https_proxy" "all_proxy" "no_proxy" ];
    SSL_CERT_FILE = "${pkgs.cacert}/etc/ssl/certs/ca-bundle.crt";
    REQUESTS_CA_BUNDLE = "${pkgs.cacert}/etc/ssl/certs/ca-bundle.crt";
  };
  wheel = file:
    let parts = filter isString (split "-" file);
    in run file (fixed wheels.wheels.${file} // {
      nativeBuildInputs = [ (python.withPackages (packages: [ packages.pip ])) ];
      buildCommand = ''
        echo "${head parts}==${elemAt parts 1} --hash=sha256:${wheels.wheels.${file}}" > pinned
        python3 -m pip download --quiet --no-cache-dir --no-deps --only-binary :all: --requirement pinned
        mv *.whl $out
      '';
    });
  installed = name:
    let
      unpinned = throw "nix/python.json has no wheels for Python ${python.pythonVersion}: nix/lock_python.py writes it";
      needed = map wheel (wheels.needed.${name}.${python.pythonVersion}.${system} or unpinned);
    in run "python-${name}" (patched {
      buildCommand = ''
        mkdir $out
        for wheel in ${toString needed}; do python3 -m zipfile -e $wheel $out; done
        ${compileall} $out
      '';
    });
  dependencies = installed "builder";
  fetch = pin: step "${pin.project}-${pin.version}-ranges" "fetch" { inherit pin; }
    (fixed pin.fetched);

  # The lock with some components only, for this system.
  lockOf = names: {
    inherit (lock) schema;
    components = mapAttrs (_: pin: pin // { platforms = intersectAttrs { any = null; ${system} = null; } pin.platforms; })
      (intersectAttrs (listToAttrs (map (name: { inherit name; value = null; }) names)) lock.components);
  };
  # The programs of CUDA are linked with the C library; clang's one program is static.
  isPatched = name: match "cuda-[0-9.]+" name != null;
  treeOf = mapAttrs (name: pin: step name "unpack" {
    kind = name;
    lock = lockOf [ name ];
    fetched = map fetch (pin.platforms.any or pin.platforms.${system});
  } (when (isPatched name) (patched { buildCommand = "python3 -m kernel_builder.nix unpack $specPath $out"; })))
    lock.components;
  # As in kernel_builder/backends/cuda/toolkits.py: clang compiles for the releases of its major release without an nvcc.
  clang = "clang-22"; # as CLANG in kernel_builder/backends/__init__.py
  ofClang = ofCuda.clang.cuda;
  isByClang = release: release != null && !(lock.components ? "cuda-${release}" && release != ofClang)
    && head (splitVersion release) == head (splitVersion ofClang);
  toolkitOf = release: if isByClang release then ofClang else release;
  # Header libraries that `depends` names.
  pinnedLibrary = name: if lock.components ? ${name} then name else throw ("no package index has ${name}, which a kernel "
    + "depends on; `kernel-builder build` with KERNEL_BUILDER_DEPENDENCIES=${name}=DIR builds with a checkout of it");
  # The stub libraries that every binary is linked against. A package would take 1.5 s to build them.
  sysroot = step "sysroot" "sysroot" { lock = lockOf [ ]; } { };
  # The compilers and headers of a variant. `isCompiled`: whether it has code; `depends`: its header libraries.
  toolchain = { cuda, floor, ... }@variant: { isCompiled, depends }:
    let
      # The stable ABI of a release before the first pinned one is targeted with the headers of the first.
      stable = filter (name: match "torch-.*-stable" name != null) (attrNames lock.components);
      releases = map (name: elemAt (split "-" name) 2) stable;
      oldest = head (sort (a: b: compareVersions a b < 0) releases);
      release = if floor != null && compareVersions floor oldest < 0 then oldest else variant.release;
      toolkit = toolkitOf cuda;
      names = (if cuda == null then [ ] else [ "cuda-${toolkit}" "cuda-libraries-${toolkit}" ])
        ++ (if isByClang cuda then [ clang ] else [ ])
        ++ (if isCompiled then [ "torch-${release}-${if floor == null then "full" else "stable"}" ] else [ ])
        ++ map pinnedLibrary (filter (name: name != "torch") depends);
    in {
      lock = lockOf names;
      trees = listToAttrs (map (name: { inherit name; value = treeOf.${name}; }) names);
    };

  # A project. `path` is its directory; `commit` is the commit of the sources, for the metadata of its packages.
  kernel = { path, commit }@given:
    let
      build = fromTOML (readFile (path + "/build.toml"));
      inherit (build) general;
      torch = build.torch or { };
      kernels = build.kernel or { };
      isCompiled = build ? torch;
      # Edition 6 has `language`, older ones `backend`.
      backendOf = kernel: kernel.backend or (elemAt (match "[a-z]+-([a-z]+)" kernel.language) 0);
      # A variant's kernels. One is left out where the CUDA release is older than its `cuda-minver`.
      kernelsOf = variant: filter (kernel: backendOf kernel == variant.backend && (variant.cuda == null
        || !(kernel ? cuda-minver) || compareVersions kernel.cuda-minver variant.cuda <= 0)) (attrValues kernels);
      toolchainOf = variant: toolchain variant {
        inherit isCompiled;
        depends = concatMap (kernel: kernel.depends or [ ]) (kernelsOf variant);
      };
      package = variant:
        let
          # `csrc` as in compile_steps.py.
          listed = table: filter (file: !isLinked path file) (table.include or [ ]) ++ table.src or [ ];
        in step "${general.name}-${variant.name}" "package" ({
          inherit commit;
          builder = builderCommit;
          variant = variant.name;
          source = sources general.name path ([ "build.toml" "torch-ext" ]
            ++ (if pathExists (path + "/csrc") then [ "csrc" ] else [ ])
            ++ concatMap listed ([ torch ] ++ attrValues kernels));
        } // when isCompiled { inherit sysroot; } // toolchainOf variant) {
          nativeBuildInputs = [ python pkgs.ninja ];
        };
      variants = variantsOf build;
      packages = listToAttrs (map (variant: { inherit (variant) name; value = package variant; }) variants);
      bundleOf = variants: directory general.name "cp -r"
        (listToAttrs (map ({ name, ... }: { inherit name; value = packages.${name}; }) variants));
    in {
      inherit build bundleOf path variants;
      toolchain = toolchainOf;
      bundle = bundleOf variants;
      variant = name: if packages ? ${name} then bundleOf [ { inherit name; } ] else throw (concatStringsSep "\n  "
        ([ "${general.name} has no variant ${name} on ${system}; it has" ] ++ attrNames packages));
    };
  builderCommit = commit;
in { inherit builder dependencies directory installed kernel libraries pkgs python run stdenv; }

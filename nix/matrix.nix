# The variants that a build.toml offers on one system. The rules are those of kernel_builder/config/offered.py; a test
# compares the two. The result has names and versions only: steps.nix chooses the compilers.
{ matrix, ofCuda, system }: build: with builtins;
let
  torch = build.torch or { };
  range = build.general.cuda or { };
  atMost = low: high: low == null || high == null || compareVersions low high <= 0;
  ascending = sort (a: b: compareVersions a b < 0);
  # Edition 6 has `language`, older ones `backend`.
  backendOf = kernel: kernel.backend or (elemAt (match "[a-z]+-([a-z]+)" kernel.language) 0);
  cudaKernels = filter (kernel: backendOf kernel == "cuda") (attrValues (build.kernel or { }));
  floors = map (kernel: kernel.cuda-minver or null) cudaKernels;
  usable = filter (release: atMost (range.minver or null) release && atMost release (range.maxver or null)
    && (floors == [ ] || any (floor: atMost floor release) floors));
  inRange = filter (release: atMost (torch.minver or null) release && atMost release (torch.maxver or null));
  newest = list: count:
    let size = length list; in genList (n: elemAt list (size - 1 - n)) (if count < size then count else size);
  oldestOfEachMajor = releases: attrValues
    (foldl' (kept: release: { ${head (splitVersion release)} = release; } // kept) { } (ascending releases));

  # `floor` is the oldest Torch of a variant on the stable ABI, else null.
  variant = backend: floor: release: cuda:
    let
      digits = replaceStrings [ "." ] [ "" ];
      named = framework: "${framework}-${if cuda == null then backend else "cu${digits cuda}"}-${system}";
      stable = "torch-stable-abi${digits release}";
    in {
      inherit backend floor release cuda;
      name = named (if floor == null then "torch${digits release}-cxx11" else stable);
    };
  compiled = backend:
    let
      abi = torch.stable-abi or null;
      floor = if isAttrs abi then abi.${backend} or null else abi;
      releases = newest (inRange (ascending (attrNames matrix.torch))) matrix.hub.torch-releases;
      cudas = release:
        if backend == "cpu" then [ null ] else usable (ofCuda.torch.${release}.releases or [ ]);
      stableCudas = if backend == "cpu" then [ null ] else oldestOfEachMajor (usable (attrNames ofCuda.release));
      earlier = filter (release: compareVersions release floor < 0) (inRange (attrNames matrix.torch));
      full = if floor == null then releases else if torch ? minver then earlier else [ ];
    in concatMap (release: map (variant backend null release) (cudas release)) full
      ++ (if floor == null then [ ] else map (variant backend floor floor) stableCudas);
  pythonOnly = backend: { inherit backend; name = "torch-${backend}"; cuda = null; floor = null; };
in
if build ? torch-noarch then map pythonOnly build.general.backends
else if build ? torch then concatMap compiled (filter (backend: elem backend [ "cpu" "cuda" ]) build.general.backends)
else [ ]

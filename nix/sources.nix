# The files that a source can include: at least those that kernel_builder/steps/include_scan.py finds when it scans again
# in the compile step. This scan does not understand comments and conditions. A file that is not needed costs a compile
# when it changes; a missing file is an error of the compile step.
root: { include, listed }: source: with builtins;
let
  start = stringLength (toString root) + 1;
  # A file's name in the project, without `.` and `..`; empty if it is outside the project or not a file.
  inside = name:
    let file = root + "/${name}";
    in if substring 0 start (toString file) == "${toString root}/" && pathExists file
      && (readDir (dirOf file)).${baseNameOf file} != "directory"
    then substring start (stringLength (toString file)) (toString file) else "";
  includes = file:
    let
      content = readFile (root + "/${file}");
      # Lines that end in a backslash go on in the next.
      text = replaceStrings [ "\\\n" "\\\r\n" ] [ "" "" ] content;
      directive = "(#|%:|[?][?]=)[[:space:]]*(include|include_next|import|embed)[[:space:]]*";
    in {
      namespace = length (split "(TORCH|TVM_FFI)_EXTENSION_NAME" content) > 1;
      names = map (groups: elemAt groups 2) (filter isList (split "${directive}[<\"]([^>\"\n]+)[>\"]" text));
      computed = length (split "${directive}[A-Za-z_]" text) > 1; # `#include MACRO` can name any file
    };
  visit = { key }:
    let
      seen = includes key;
      places = name: map (place: inside "${place}/${name}") ([ "${key}/.." ] ++ include);
      candidates = concatMap places seen.names ++ (if seen.computed then listed else [ ]);
    in map (key: { inherit key; }) (filter (file: file != "") candidates);
  files = map (one: one.key) (genericClosure { startSet = [ { key = source; } ]; operator = visit; });
  # As _CUDA_LIBRARIES in include_scan.py.
  isCudaLibrary = name:
    match ("(cublas|cudalibxt|cuda_profiler|cudaProfiler|cudnn|cufft|curand|cusolver|cusparse)[A-Za-z0-9_]*[.]h"
      + "|(nvblas|nvml|nvrtc)[.]h|nvtx3/.*|c10/cuda/driver_api[.]h|(ATen|torch)/(.*/)?(cuda|cudnn).*|cutlass/util/.*") name
    != null;
  isTorch = name: elem (head (split "/" name)) [ "ATen" "c10" "caffe2" "torch" ];
  found = map includes files;
  computed = any (one: one.computed) found;
in {
  inherit files computed;
  torch = computed || any (one: any isTorch one.names) found;
  cudaLibraries = computed || any (one: any isCudaLibrary one.names) found;
  # Whether a file mentions the op namespace, which is known only when the package is linked.
  namespace = any (one: one.namespace) found;
}

# What a source can reach through its includes: at least what kernel_builder/build/include_scan.py finds, which looks again in the
# step. Comments and conditions are not read: a file too many costs a needless compilation when it changes, and one too
# few is an error of the compile step.
root: { include, listed }: source: with builtins;
let
  start = stringLength (toString root) + 1;
  # A file's name in the project, without `.` and `..`; empty where it leads out of the project or is no file.
  inside = name:
    let file = root + "/${name}";
    in if substring 0 start (toString file) == "${toString root}/" && pathExists file
      && (readDir (dirOf file)).${baseNameOf file} != "directory"
    then substring start (stringLength (toString file)) (toString file) else "";
  includes = file:
    let
      text = readFile (root + "/${file}");
      directive = "#[[:space:]]*(include|include_next|import)[[:space:]]*";
    in {
      names = map (groups: elemAt groups 1) (filter isList (split "${directive}[<\"]([^>\"\n]+)[>\"]" text));
      computed = length (split "${directive}[A-Za-z_]" text) > 1; # of a macro, so it could be any file
    };
  visit = { key }:
    let
      seen = includes key;
      places = name: map (place: inside "${place}/${name}") ([ "${key}/.." ] ++ include);
      candidates = concatMap places seen.names ++ (if seen.computed then listed else [ ]);
    in map (key: { inherit key; }) (filter (file: file != "") candidates);
  files = map (one: one.key) (genericClosure { startSet = [ { key = source; } ]; operator = visit; });
  isTorch = name: elem (head (split "/" name)) [ "ATen" "c10" "caffe2" "torch" ];
  computed = any (file: (includes file).computed) files;
in {
  inherit files computed;
  torch = computed || any (file: any isTorch (includes file).names) files;
}

# What a source can reach through its includes: at least what kernel_builder/sources.py finds, which looks again in the
# step. Comments and conditions are not read: a file too many costs a needless compilation when it changes, and one too
# few is an error of the compile step.
root: { include, listed }: source: with builtins;
let
  isFile = file: pathExists (root + "/${file}")
    && (readDir (dirOf (root + "/${file}"))).${baseNameOf file} != "directory";
  # `a/./b/../c` -> `a/c`; empty where it leads out of the project.
  normal = name:
    let
      join = parts: part:
        if parts == null || part == "" || part == "." then parts
        else if part != ".." then parts ++ [ part ]
        else if parts == [ ] then null
        else genList (elemAt parts) (length parts - 1);
      parts = foldl' join [ ] (filter isString (split "/" name));
    in if parts == null then "" else concatStringsSep "/" parts;
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
      beside = if match ".*/.*" key == null then "." else dirOf key;
      places = name: map (place: normal "${place}/${name}") ([ beside ] ++ include);
      candidates = concatMap places seen.names ++ (if seen.computed then listed else [ ]);
    in map (key: { inherit key; }) (filter (file: file != "" && isFile file) candidates);
  files = map (one: one.key) (genericClosure { startSet = [ { key = source; } ]; operator = visit; });
  isTorch = name: elem (head (split "/" name)) [ "ATen" "c10" "caffe2" "torch" ];
  computed = any (file: (includes file).computed) files;
in {
  inherit files computed;
  torch = computed || any (file: any isTorch (includes file).names) files;
}

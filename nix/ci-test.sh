# ci-test [PYTEST OPTION]...: test $bundle in a copy of $project by its tests that have the marker `kernels_ci`.
# A project without tests, or without any that are marked, passes.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$project" "$work/project"
chmod -R u+w "$work"
cd "$work/project"
rm -rf build
ln -s "$bundle" build
[ ! -d tests ] || python3 -m pytest -p no:cacheprovider -m kernels_ci "$@" tests || [ $? = 5 ]

# ci-test [PYTEST OPTION]...: run the tests with the marker `kernels_ci` in a copy of $project, on the packages of $bundle.
# A project without tests, or without marked ones, passes.
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$project" "$work/project"
chmod -R u+w "$work"
cd "$work/project"
rm -rf build
ln -s "$bundle" build
[ ! -d tests ] || python3 -m pytest -p no:cacheprovider -m kernels_ci "$@" tests || [ $? = 5 ]

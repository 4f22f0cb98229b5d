#!/bin/sh
# Copies a Hub while its servers run:  backup.sh ROOT TARGET
#
# TARGET is new. It has each commit that was acknowledged before the start, and maybe later ones. References are copied
# before their targets: refs, then objects, then large files. `kernel-hub check` and `kernel-hub gc`, which remove large
# files, must not run meanwhile. Servers create the index, the secret and locks again, so these are not copied.
set -eu

[ $# = 2 ] && [ -d "$1/repositories" ] || { echo "usage: backup.sh ROOT TARGET, where ROOT is a Hub's" >&2; exit 2; }
root=$1 target=$2
[ ! -e "$target" ] || { echo "$target exists; expected a new directory" >&2; exit 2; }
mkdir -p -m 700 "$target/repositories"

# Git removes files that it has packed or locked while they are copied: try again with the remaining files.
copy() {
    for attempt in 1 2 3 4 5 6 7 8 9; do
        ! cp -a --reflink=auto "$@" 2>/dev/null || return 0
        sleep "0.$attempt"
    done
    cp -a --reflink=auto "$@"
}

# Every step ends with `|| return`: `set -e` has no effect in a function whose status is tested.
repository() {
    from=$root/repositories/$1 to=$target/repositories/$1
    mkdir -p "$to/objects/info" || return
    copy "$from/refs" "$to/" || return                         # before packed-refs, where git moves them to
    if [ -e "$from/packed-refs" ]; then copy "$from/packed-refs" "$to/" || return; fi
    copy "$from/HEAD" "$from/config" "$from/large" "$to/" || return
    for folder in "$from"/objects/??; do                       # before packs, where git moves them to
        [ ! -d "$folder" ] || copy "$folder" "$to/objects/" || [ ! -d "$folder" ] || return
    done
    copy "$from/objects/pack" "$to/objects/" || return
    find "$to" -name '*.lock' -delete
}

# A repository that is renamed meanwhile keeps its inode and its time of birth; one that is created again does not.
identity() { stat -c '<%i %w>' "$@" 2>/dev/null || true; }
first=$(identity "$root"/repositories/*/*.git)
more=yes rounds=0
while [ -n "$more" ] && [ "$rounds" -lt 50 ]; do
    more='' rounds=$((rounds + 1))
    for path in "$root"/repositories/*/*.git; do
        copied=$target/repositories/${path#"$root"/repositories/}
        [ -d "$path" ] && [ ! -d "$copied" ] || continue
        began=$(identity "$path")
        repository "${path#"$root"/repositories/}" || [ "$(identity "$path")" != "$began" ] || exit 1
        [ "$(identity "$path")" = "$began" ] || rm -rf "$copied"
    done
    for path in "$target"/repositories/*/*.git; do
        [ -d "$root/repositories/${path#"$target"/repositories/}" ] || rm -rf "$path"  # deleted or renamed meanwhile
    done
    for path in "$root"/repositories/*/*.git; do
        [ ! -d "$target/repositories/${path#"$root"/repositories/}" ] || continue
        now=$(identity "$path")
        case $first in *"${now:-none}"*) more=$path ;; esac
    done
done
[ ! -d "$root/large" ] || copy "$root/large" "$target/"
for path in "$target"/repositories/*/*.git; do
    [ -d "$root/repositories/${path#"$target"/repositories/}" ] && continue
    for marker in "$path"/large/*; do                          # deleted since, before its large files were copied
        file=$(echo "${marker##*/}" | sed 's|^\(..\)\(..\)|\1/\2/&|')
        [ ! -e "$marker" ] || [ -e "$target/large/$file" ] || { rm -rf "$path"; break; }
    done
done
sync
[ -z "$more" ] || { echo "$more was renamed again and again and is missing; the other copies are complete" >&2; exit 1; }

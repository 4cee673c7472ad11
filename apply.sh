#!/usr/bin/env bash
# Puts the patch set under patches/ into SGLang and Megatron-core, or takes it out again.
# Works on copies and swaps the files in only when every patch fits: it changes all or nothing.
set -euo pipefail
unset CDPATH

usage() {
    cat <<'EOF'
usage: apply.sh [--check | --reverse | --list] [--only sglang|megatron-core] [TARGET]

Applies the patches of the release that it finds in TARGET. TARGET is a source checkout (SGLang's
or Megatron's), a site-packages folder, or a virtual environment. Without TARGET: the sglang and
the megatron-core that $PYTHON (python3 if unset) imports.

  (none)     apply the patches that are not applied yet; a second run changes nothing
  --check    change nothing; say of every patch: applied, applicable, or does not match
  --reverse  take the patches out; a second run changes nothing
  --list     show the patches of every supported release
  --only P   leave the other package alone, even where TARGET has both

Needs git or patch. The patched files import sglang-rdt: install it in the same environment.

Exit status:
  0  done; with --check: every patch is applied or applicable (a mixture counts as good)
  1  refused, and nothing was changed: a patch does not match, the release is not supported,
     nothing to patch was found, or TARGET cannot be written
  2  wrong arguments
EOF
}

die() {
    printf 'apply.sh: %s\n' "$*" >&2
    exit 1
}

usage_error() {
    printf 'apply.sh: %s\n' "$*" >&2
    usage >&2
    exit 2
}

mode=apply
only=
target=
set_mode() {
    [ "$mode" = apply ] || usage_error "--check, --reverse and --list exclude one another"
    mode=$1
}
while [ $# -gt 0 ]; do
    case $1 in
        --check | --reverse | --list) set_mode "${1#--}" ;;
        --only)
            [ $# -ge 2 ] || usage_error "--only needs sglang or megatron-core"
            only=$2
            shift
            ;;
        --only=*) only=${1#--only=} ;;
        -h | --help)
            usage
            exit 0
            ;;
        --) # the rest is TARGET
            shift
            break
            ;;
        -*) usage_error "unknown option $1" ;;
        *)
            [ -z "$target" ] || usage_error "more than one TARGET"
            target=$1
            ;;
    esac
    shift
done
if [ $# -gt 0 ]; then
    { [ -z "$target" ] && [ $# -eq 1 ]; } || usage_error "more than one TARGET"
    target=$1
fi
case $only in
    '') packages='sglang megatron-core' ;;
    sglang | megatron-core) packages=$only ;;
    *) usage_error "--only takes sglang or megatron-core, not $only" ;;
esac

here=$(cd -- "$(dirname -- "$(readlink -f -- "${BASH_SOURCE[0]}")")" && pwd -P)
patch_sets=$here/patches
[ -d "$patch_sets" ] || die "there is no patches/ folder beside $here/apply.sh"

supported_versions() { # PACKAGE
    (cd -- "$patch_sets/$1" 2>/dev/null && ls -d -- */ | tr -d / | sort -V) || true
}

# The folder of PACKAGE inside a site-packages folder.
folder_of() { # PACKAGE
    case $1 in
        sglang) echo sglang/srt ;;
        *) echo megatron/core ;;
    esac
}

if [ "$mode" = list ]; then
    [ -z "$target" ] || usage_error "--list takes no TARGET"
    for package in $packages; do
        for version in $(supported_versions "$package"); do
            printf '%s %s\n' "$package" "$version"
            for file in "$patch_sets/$package/$version"/*.patch; do
                printf '  %-28s %s\n' "${file##*/}" "$(sed -n 's/^What: //p;/^---/q' "$file")"
            done
        done
    done
    exit 0
fi

# ---------------------------------------------------------------- what is there, and which release

root_sglang=
root_megatron=
get_root() { # PACKAGE
    case $1 in
        sglang) printf '%s' "$root_sglang" ;;
        *) printf '%s' "$root_megatron" ;;
    esac
}

# Notes that PACKAGE is in DIR, if it is. Symbolic links are followed: an installed package may be
# a link into a checkout.
look_in() { # PACKAGE DIR
    local folder real root known
    folder=$(folder_of "$1")
    [ -d "$2/$folder" ] || return 0
    real=$(cd -P -- "$2/$folder" && pwd -P)
    case $real in
        */"$folder") root=${real%/"$folder"} ;;
        *) die "$2/$folder is a link to $real, which is not called $folder" ;;
    esac
    known=$(get_root "$1")
    [ -z "$known" ] || [ "$known" = "$root" ] ||
        die "$1 is in both $known and $root; give one of them as TARGET"
    case $1 in
        sglang) root_sglang=$root ;;
        *) root_megatron=$root ;;
    esac
}

python_locations() { # PYTHON; one "PACKAGE<tab>DIR" per line
    "$1" - <<'EOF'
import importlib.util
import os
import sys

# A script on standard input sees the current folder first; what is there is not installed.
if sys.path and sys.path[0] == "":
    del sys.path[0]
for package, name, folder in (("sglang", "sglang", "srt"), ("megatron-core", "megatron", "core")):
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    for location in (spec and spec.submodule_search_locations) or ():
        if os.path.isdir(os.path.join(location, folder)):
            print(package, os.path.dirname(os.path.abspath(location)), sep="\t")
            break
EOF
}

if [ -n "$target" ]; then
    [ -d "$target" ] || die "$target is not a folder"
    for package in $packages; do
        for dir in "$target" "$target/python" "$target"/lib*/python3*/site-packages \
            "$target"/lib/python3*/dist-packages; do
            look_in "$package" "$dir"
        done
    done
    where="in $target (nor in its python/ or lib/python3*/site-packages/)"
else
    python=${PYTHON:-python3}
    command -v -- "$python" >/dev/null ||
        die "$python is not on PATH; give the TARGET to patch, or set PYTHON"
    locations=$(python_locations "$python") || die "$python could not be run"
    while IFS=$'\t' read -r package dir; do
        case " $packages " in
            *" $package "*) look_in "$package" "$dir" ;;
        esac
    done <<<"$locations"
    where="among the packages of $python"
fi

found=
for package in $packages; do
    [ -z "$(get_root "$package")" ] || found="$found $package"
done
[ -n "$found" ] || die "found no ${packages/ / and no } $where"

# The version in the METADATA of the only DISTRIBUTION-*.dist-info in DIR, if there is one.
metadata_version() { # DIR DISTRIBUTION
    set -- "$1"/"$2"-*.dist-info/METADATA
    [ $# -eq 1 ] && [ -f "$1" ] || return 0
    sed -n '/^Version: */{s///p;q;}' "$1"
}

# The literal string that NAME is set to in a Python FILE, if there is one.
python_string() { # FILE NAME
    [ -f "$1" ] || return 0
    sed -n "/^$2 *=[^'\"]*['\"]\([^'\"]*\)['\"].*/{s//\1/p;q;}" "$1"
}

python_number() { # FILE NAME
    sed -n "/^$2 *= *\([0-9][0-9]*\).*/{s//\1/p;q;}" "$1"
}

version_of() { # PACKAGE ROOT
    local version='' info
    case $1 in
        sglang)
            version=$(python_string "$2/sglang/_version.py" __version__)
            [ -n "$version" ] || version=$(metadata_version "$2" sglang)
            [ -n "$version" ] || version=$(python_string "$2/sglang/version.py" __version__)
            # 0.0.0 is what version.py says where nothing was built; a release checkout has a tag.
            case $version in
                '' | 0.0.0*)
                    if [ -e "$2/../.git" ] && command -v git >/dev/null; then
                        version=$(git -C "$2" describe --tags --exact-match --match 'v[0-9]*' \
                            2>/dev/null) || version=
                    fi
                    ;;
            esac
            ;;
        *)
            info=$2/megatron/core/package_info.py
            if [ -f "$info" ]; then
                version=$(python_number "$info" MAJOR).$(python_number "$info" MINOR)
                version=$version.$(python_number "$info" PATCH)
                version=$version$(python_string "$info" PRE_RELEASE)
            fi
            case $version in
                '' | .* | *..* | *.) version=$(metadata_version "$2" megatron_core) ;;
            esac
            ;;
    esac
    version=${version#v}
    printf '%s' "${version%%+*}" # a local part, as in 0.5.23+cu130, says how it was built
}

version_sglang=
version_megatron=
get_version() { # PACKAGE
    case $1 in
        sglang) printf '%s' "$version_sglang" ;;
        *) printf '%s' "$version_megatron" ;;
    esac
}

for package in $found; do
    root=$(get_root "$package")
    version=$(version_of "$package" "$root")
    supported=$(supported_versions "$package" | paste -s -d, - | sed 's/,/, /g')
    [ -n "$version" ] || die "cannot tell which release of $package is in $root (supported: $supported)"
    [ -d "$patch_sets/$package/$version" ] ||
        die "$package $version in $root is not supported; supported are: $supported"
    case $package in
        sglang) version_sglang=$version ;;
        *) version_megatron=$version ;;
    esac
done

# ------------------------------------------------------------------------- try everything on copies

if command -v git >/dev/null; then
    tool=git
elif command -v patch >/dev/null; then
    tool=patch
else
    die "neither git nor patch is on PATH; install one of them"
fi

temporary=()
cleanup() {
    rm -rf -- ${temporary[@]+"${temporary[@]}"}
}
trap cleanup EXIT
trap 'exit 1' HUP INT TERM

stage=$(mktemp -d) || die "cannot make a temporary folder in ${TMPDIR:-/tmp}; set TMPDIR"
temporary+=("$stage")
stage=$(cd -P -- "$stage" && pwd -P)
mkdir -- "$stage/before" "$stage/after" "$stage/empty"

# The patch tool in DIR, with exact context, and deaf to the caller's repository and configuration.
run_tool() { # DIR FILE [-R]
    local dir=$1 file=$2
    shift 2
    case $tool in
        git)
            (
                cd -- "$dir"
                unset "${!GIT_@}"
                HOME=$stage/empty XDG_CONFIG_HOME=$stage/empty GIT_CONFIG_NOSYSTEM=1 \
                    GIT_CEILING_DIRECTORIES=$stage \
                    git apply -p1 --whitespace=nowarn "$@" -- "$file"
            )
            ;;
        patch) patch -d "$dir" -p1 -F0 -f -s -r - --no-backup-if-mismatch "$@" -i "$file" ;;
    esac >/dev/null 2>&1
}

paths=()
read_paths() { # PATCH FILE; sets paths to the files that it changes
    local line
    paths=()
    while IFS= read -r line; do
        case $line in '+++ b/'*) paths+=("${line#+++ b/}") ;; esac
    done <"$1"
}

# Applies FILE to a copy of what $stage/after/PACKAGE holds, in $stage/try. Fails where it does not
# fit, and where the tool left any file as it was (git skips paths that it takes to be outside).
attempt() { # PACKAGE FILE [-R]
    local from=$stage/after/$1 patch=$2 path
    shift 2
    read_paths "$patch"
    rm -rf -- "$stage/try"
    for path in "${paths[@]}"; do
        [ -f "$from/$path" ] || return 1
        mkdir -p -- "$stage/try/${path%/*}"
        cp -- "$from/$path" "$stage/try/$path"
    done
    run_tool "$stage/try" "$patch" "$@" || return 1
    for path in "${paths[@]}"; do
        ! cmp -s -- "$from/$path" "$stage/try/$path" || return 1
    done
}

keep_attempt() { # PACKAGE; after attempt
    local path
    for path in "${paths[@]}"; do
        mv -f -- "$stage/try/$path" "$stage/after/$1/$path"
    done
}

why_no_match() { # PACKAGE; after attempt
    local path
    for path in "${paths[@]}"; do
        if [ ! -f "$stage/before/$1/$path" ]; then
            echo "there is no $path"
            return
        elif grep -q '^_SGLANG_RDT_PATCHED' "$stage/before/$1/$path"; then
            echo "$path has other sglang-rdt lines: take them out with the apply.sh they came from"
            return
        fi
    done
    echo "the lines to patch are not as released"
}

report=
say() { # PACKAGE VERSION PATCH STATE
    local line
    printf -v line '%-13s %-8s %-28s %s' "$1" "$2" "${3##*/}" "$4"
    report+=$line$'\n'
}

mismatches=0
changes=0
for package in $found; do
    root=$(get_root "$package")
    version=$(get_version "$package")
    set -- "$patch_sets/$package/$version"/*.patch
    for file in "$@"; do
        read_paths "$file"
        for path in "${paths[@]}"; do
            [ -f "$root/$path" ] || continue
            [ -r "$root/$path" ] || die "cannot read $root/$path"
            mkdir -p -- "$stage/before/$package/${path%/*}" "$stage/after/$package/${path%/*}"
            # Not cp: the copies are to be writable, whatever the mode of the file.
            cat -- "$root/$path" >"$stage/before/$package/$path"
            cat -- "$root/$path" >"$stage/after/$package/$path"
        done
    done
    if [ "$mode" = reverse ]; then # last applied, first out
        reversed=()
        for file in "$@"; do reversed=("$file" ${reversed[@]+"${reversed[@]}"}); done
        set -- "${reversed[@]}"
    fi
    for file in "$@"; do
        if attempt "$package" "$file" -R; then
            case $mode in
                check) state='applied' ;;
                apply) state='already applied' ;;
                reverse)
                    state='taken out'
                    keep_attempt "$package"
                    changes=$((changes + 1))
                    ;;
            esac
        elif attempt "$package" "$file"; then
            case $mode in
                check)
                    state='applicable'
                    keep_attempt "$package" # a later patch may build on this one
                    ;;
                apply)
                    state='applied'
                    keep_attempt "$package"
                    changes=$((changes + 1))
                    ;;
                reverse) state='not applied' ;;
            esac
        else
            state="does not match: $(why_no_match "$package")"
            mismatches=$((mismatches + 1))
        fi
        say "$package" "$version" "$file" "$state"
    done
done

for package in $found; do
    printf '%s %s: %s\n' "$package" "$(get_version "$package")" "$(get_root "$package")"
done

if [ "$mode" = check ]; then
    printf '%s' "$report"
    [ "$mismatches" -eq 0 ] || exit 1
    exit 0
fi
if [ "$mismatches" -gt 0 ]; then
    # Say what does not fit, not what would have been done.
    printf '%s' "$report" | grep 'does not match: ' >&2
    die "nothing was changed"
fi
if [ "$changes" -eq 0 ]; then
    printf '%s' "$report"
    case $mode in
        apply) echo "nothing to do: every patch is already applied" ;;
        reverse) echo "nothing to do: no patch is applied" ;;
    esac
    exit 0
fi

# ------------------------------------------------------------------------------- swap the files in

# New files beside the old ones, with their owner and mode; then renames, which also leave alone
# whatever else is hard-linked to the old files (package managers share them among environments).
write_beside() { # CONTENTS OLD NEW
    local bits
    bits=$(stat -L -c %a -- "$2") && cp -p -- "$2" "$3" && chmod u+w -- "$3" &&
        cat -- "$1" >"$3" && chmod "$bits" -- "$3"
}

changed=() # paths under $stage/after
old_files=()
for package in $found; do
    while IFS= read -r -d '' staged; do
        path=${staged#"$stage/after/"}
        ! cmp -s -- "$staged" "$stage/before/$path" || continue
        changed+=("$path")
        old_files+=("$(get_root "$package")/${path#"$package/"}")
    done < <(find "$stage/after/$package" -type f -print0)
done

suffix=.sglang-rdt-$$
for i in "${!changed[@]}"; do
    old=${old_files[$i]}
    temporary+=("$old$suffix")
    { [ -w "$(dirname -- "$old")" ] &&
        write_beside "$stage/after/${changed[$i]}" "$old" "$old$suffix" 2>/dev/null; } ||
        die "cannot write to $(dirname -- "$old"); nothing was changed"
done

trap '' HUP INT TERM
for i in "${!changed[@]}"; do
    old=${old_files[$i]}
    mv -f -- "$old$suffix" "$old" 2>/dev/null && continue
    for ((j = 0; j < i; j++)); do
        done_file=${old_files[$j]}
        { write_beside "$stage/before/${changed[$j]}" "$done_file" "$done_file$suffix" &&
            mv -f -- "$done_file$suffix" "$done_file"; } ||
            die "cannot replace $old, nor restore $done_file; see apply.sh --check"
    done
    die "cannot replace $old; nothing was changed"
done

printf '%s' "$report"
if [ "$mode" = apply ]; then
    echo "done; the patched files need sglang-rdt in the same environment (pip install sglang-rdt)"
else
    echo "done; the lines of sglang-rdt are out"
fi

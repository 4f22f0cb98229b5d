"""Writing to one git repository: commits, pull requests and merges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pygit2
from pygit2.enums import FileMode

from kernel_hub import names
from kernel_hub.git.command import GitConfiguration, merge_base
from kernel_hub.git.objects import FileChange, PullRequest, peeled, retry_reading, write_commit
from kernel_hub.git.refs import GitRefs, OwnedFiles
from kernel_hub.git.revisions import TREE_BYTES, GitRevisions
from kernel_hub.git.tree_changes import add_folders, changed_tree
from kernel_hub.refusals import bad_request, conflict, forbidden, moved_meanwhile, no_revision
from kernel_hub.storage.disk import BLOCK

# Lets `git` with LFS read a clone.
_ATTRIBUTES = b"*.so filter=lfs diff=lfs merge=lfs -text\n*.a filter=lfs diff=lfs merge=lfs -text\n"
_LAST = "hub.last-pull-request"  # set when one is deleted
ATTRIBUTES_OID = str(pygit2.hash(_ATTRIBUTES))


class GitCommits:
    """Writes commits to one repository, which is opened as `git`."""

    def __init__(
        self, repo_id: str, git: pygit2.Repository, refs: GitRefs, configuration: GitConfiguration, owned: OwnedFiles
    ) -> None:
        self._repo_id = repo_id
        self._git = git
        self._refs = refs
        self._configuration = configuration
        self._owned = owned

    def write_blob(self, data: bytes) -> str:
        """Write the content of a small file, and return its id."""
        return str(retry_reading(partial(self._git.create_blob, data)))

    def create_first(self, author: str) -> None:
        """Create `main` with its first commit. No lock is needed, since the repository is not visible yet."""
        builder = self._git.TreeBuilder()
        builder.insert(".gitattributes", self._git.create_blob(_ATTRIBUTES), FileMode.BLOB)
        commit = write_commit(self._git, [], builder.write(), "initial commit", author)
        self._refs.move("refs/heads/main", commit, None)

    def create(
        self,
        revision: str,
        changes: Sequence[FileChange],
        *,
        title: str,
        description: str,
        author: str,
        parent: str | None = None,
        pull_request: bool = False,
        store: Callable[[], None] = lambda: None,
        most_open: int | None = None,
    ) -> tuple[str, str]:
        """Make all changes in one commit, on a branch or as a new pull request for it.

        Args:
            store: Stores the large files of the changes, after all checks.
            most_open: The most pull requests that the author may have. None: any number.

        Returns:
            The commit and the full name of the ref that points to it.

        Raises:
            Refusal: If the branch does not exist, is not at `parent`, or a change cannot be made.
        """

        def checked() -> tuple[str, str]:
            if pull_request:  # for a branch only, not for a tag, a commit or another pull request
                full = f"refs/heads/{revision}"
                if most_open is not None:
                    self._check_open(author, most_open)
            else:
                full = revision if revision.startswith("refs/pr/") else f"refs/heads/{names.ref_name(revision)}"
            base = self._refs.commit_of(full)
            if base is None:
                raise no_revision(self._repo_id, revision)
            if parent is not None and not base.startswith(parent):
                raise moved_meanwhile(revision, base, parent)
            self._check_owned(changes)
            return full, base

        _, first = checked()
        changed = changed_tree(self._git, first, changes)  # without the lock: a large commit takes long
        with self._refs.new.staged(), self._refs.locked():
            full, base = checked()
            if base != first:
                changed = changed_tree(self._git, base, changes)
            old: str | None = base
            if pull_request:
                full, old = f"refs/pr/{self._next_pull_request()}", None
            tree = str(changed.write())
            if tree == str(peeled(self._git, base, pygit2.Tree).id) and not pull_request:
                return base, full  # nothing changes: the same upload was sent again
            message = f"{title}\n\n{description}".strip() + "\n"
            store()
            oid = write_commit(self._git, [base], tree, message, author)
            if pull_request:
                self._configuration.set(f"pr.{full.rpartition('/')[2]}.base", revision)
                self._configuration.set(f"pr.{full.rpartition('/')[2]}.author", author)
            self._refs.move(full, oid, old)
            return oid, full

    def _check_owned(self, changes: Sequence[FileChange]) -> None:
        """Refuse large files that `kernel-hub gc` has released since the client's request named them."""
        for change in changes:
            if change.large is not None and change.large not in self._owned:
                raise bad_request(f"{change.path}: the large file {change.large} is no longer here; upload it again")

    def _check_open(self, author: str, most: int) -> None:
        """Refuse a pull request of a token that has too many already."""
        opened = sum(self.opened_by(ref) == author for ref in self._refs.names() if ref.startswith("refs/pr/"))
        if opened >= most:
            raise forbidden(f"{author!r} has {opened} pull requests here: ask an owner to merge or delete some of them")

    def opened_by(self, ref: str) -> str | None:
        """Return the name of the token that opened the pull request with this ref, or None if it is unknown."""
        number = ref.removeprefix("refs/pr/")
        return self._configuration.get(f"pr.{number}.author") if number.isdecimal() else None

    def pull_request(self, number: int) -> PullRequest:
        """Return a pull request, or raise a refusal if there is none with this number."""
        head = self._refs.resolve(f"refs/pr/{number}")
        base = self._configuration.get(f"pr.{number}.base") or "main"
        tip = self._refs.commit_of(f"refs/heads/{base}")  # None if the branch was deleted
        merged = tip is not None and merge_base(self._git.path, tip, head) == head
        return PullRequest(number, base, head, merged)

    def merge(self, number: int, commit: str, author: str, claim: Callable[[int], None]) -> str:
        """Merge a pull request into its branch, and return the commit that the branch then points to.

        `claim` is called with the bytes of new objects before they are written.

        Raises:
            Refusal: If there is no such pull request or branch, it is not at `commit`, or they changed the same files.
        """
        with self._refs.new.staged(), self._refs.locked():
            request = self.pull_request(number)
            if request.head != commit:
                raise moved_meanwhile(f"refs/pr/{number}", request.head, commit)
            branch = f"refs/heads/{request.base}"
            tip = self._refs.resolve(branch)
            if request.merged:
                return tip
            start = merge_base(self._git.path, tip, request.head)
            if start == tip:  # a fast-forward
                self._refs.move(branch, request.head, tip)
                return request.head
            # By files: a merge of lines would make contents, such as LFS pointers, that no commit has checked.
            ours, theirs = (
                {path: blob for path, _, blob in GitRevisions(self._git, 8 * TREE_BYTES).changes(start, side)}
                for side in (tip, request.head)
            )
            paths = sorted(path for path in ours.keys() & theirs if ours[path] != theirs[path])
            if paths:
                advice = f"commit to refs/pr/{number} again"
                raise conflict(f"{', '.join(paths[:5])} changed on {request.base} as well: {advice}")
            new = [(path, blob) for path, blob in theirs.items() if path not in ours]
            folders: set[str] = set()
            claim(BLOCK * sum(add_folders(folders, path) for path, _ in new))
            changes = [FileChange(path, blob) for path, blob in new]
            changed = changed_tree(self._git, tip, changes)  # which refuses names that differ in case only
            tree = str(changed.write())
            oid = write_commit(self._git, [tip, request.head], tree, f"Merge pull request {number}\n", author)
            self._refs.move(branch, oid, tip)
            return oid

    def delete_pull_request(self, number: int) -> None:
        """Delete a pull request. Its number is not used again, so that it is not taken for another."""
        self._refs.delete("pr", str(number))
        with self._refs.locked():
            if self.opened_by(f"refs/pr/{number}") is not None:
                self._configuration.set(_LAST, str(self._next_pull_request() - 1))
                self._configuration.remove(f"pr.{number}")

    def _next_pull_request(self) -> int:
        numbers = [int(name.split(".")[1]) for name in self._configuration.names("pr.")]
        return max([int(self._configuration.get(_LAST) or 0), *numbers]) + 1

//! Whether the host's kernel has killed a sandbox's process because memory ran out, and by whose
//! limit: known from counters of control groups while the sandbox's own group exists.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::LEAF;

/// The file in a sandbox's directory with how often each group above its own had been out of memory
/// when the sandbox started.
const BEFORE: &str = "cgroup-oom.json";

/// A kill because memory ran out.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct MemoryKill {
    /// The group whose limit was reached; `None` if it was the host that ran out of memory, or it
    /// is unknown.
    pub(crate) group: Option<PathBuf>,
}

/// Records in `dir` the counters of the groups above `group`.
pub(super) fn note_before(dir: &Path, root: &Path, group: &Path) -> io::Result<()> {
    let counts = above(root, group).filter_map(|path| Some((path, times_full(path)?)));
    let counts: BTreeMap<&Path, u64> = counts.collect();
    fs::write(dir.join(BEFORE), serde_json::to_vec(&counts)?)
}

/// Returns how the process of the sandbox in `dir`, whose group is or was `group`, was killed
/// because memory ran out; `None` if it was not.
pub(super) fn of(dir: &Path, root: &Path, group: &Path) -> Option<MemoryKill> {
    has_killed(group).then(|| {
        let before = fs::read(dir.join(BEFORE)).unwrap_or_default();
        // Older sandboxes have no record: then it is unknown which group was full.
        let before: BTreeMap<PathBuf, u64> = serde_json::from_slice(&before).unwrap_or_default();
        let is_full = |path: &&Path| match (times_full(path), before.get(*path)) {
            (Some(now), Some(before)) => now > *before,
            _ => false,
        };
        let own = times_full(group).is_some_and(|times| times > 0);
        let full = match own {
            true => Some(group),
            false => above(root, group).find(is_full),
        };
        MemoryKill {
            group: full.map(Path::to_owned),
        }
    })
}

/// Whether the kernel has killed something in a group because memory ran out, in whatever group.
pub(super) fn has_killed(group: &Path) -> bool {
    let kills = |group: &Path| count(&group.join("memory.events"), "oom_kill");
    // If the hierarchy is mounted with `memory_localevents`, only the process's own group counts
    // it.
    let counted = [kills(group), kills(&group.join(LEAF))];
    counted.into_iter().flatten().any(|kills| kills > 0)
}

/// How often a group itself was at its limit, with nothing left to reclaim.
fn times_full(group: &Path) -> Option<u64> {
    count(&group.join("memory.events.local"), "oom")
}

fn count(file: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let mut lines = text.lines().filter_map(|line| line.split_once(' '));
    let (_, value) = lines.find(|(key, _)| *key == name)?;
    value.trim().parse().ok()
}

/// Returns the groups above `group`, the nearest first, without the hierarchy's root, which has no
/// limit.
fn above<'a>(root: &'a Path, group: &'a Path) -> impl Iterator<Item = &'a Path> {
    let all = group.ancestors().skip(1);
    all.take_while(move |path| *path != root && path.starts_with(root))
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    /// A hierarchy in which `pods/pod/machine` is a sandbox's group, and its directory.
    struct Fake {
        root: TempDir,
        dir: TempDir,
    }

    impl Fake {
        fn new() -> Self {
            let fake = Self {
                root: tempfile::tempdir().unwrap(),
                dir: tempfile::tempdir().unwrap(),
            };
            fs::create_dir_all(fake.group("pods/pod/machine")).unwrap();
            for group in ["pods", "pods/pod", "pods/pod/machine"] {
                fake.count(group, 0, 0);
            }
            fake
        }

        fn group(&self, name: &str) -> PathBuf {
            self.root.path().join(name)
        }

        /// Sets a group's counters: how often it was full itself, and kills.
        fn count(&self, group: &str, full: u64, kills: u64) {
            let text = |oom: u64| {
                format!("low 0\nhigh 0\nmax {oom}\noom {oom}\noom_kill {kills}\noom_group_kill 0\n")
            };
            let group = self.group(group);
            fs::write(group.join("memory.events.local"), text(full)).unwrap();
            // Events of the groups below are included.
            fs::write(group.join("memory.events"), text(full + 1)).unwrap();
        }

        fn begin(&self) {
            let group = self.group("pods/pod/machine");
            note_before(self.dir.path(), self.root.path(), &group).unwrap();
        }

        /// `None` if it was not killed.
        fn killed_by(&self) -> Option<Option<PathBuf>> {
            let group = self.group("pods/pod/machine");
            of(self.dir.path(), self.root.path(), &group).map(|kill| kill.group)
        }
    }

    #[test]
    fn a_kill_is_of_the_nearest_group_that_was_full_since_the_sandbox_began() {
        let fake = Fake::new();
        // An earlier sandbox was killed by its limit, too.
        fake.count("pods/pod", 3, 3);
        fake.begin();
        assert_eq!(fake.killed_by(), None);
        fake.count("pods/pod/machine", 0, 1);
        assert_eq!(fake.killed_by(), Some(None), "the host's memory");
        fake.count("pods", 1, 7);
        assert_eq!(fake.killed_by(), Some(Some(fake.group("pods"))));
        fake.count("pods/pod", 4, 4);
        assert_eq!(fake.killed_by(), Some(Some(fake.group("pods/pod"))));
        fake.count("pods/pod/machine", 1, 1);
        let own = fake.group("pods/pod/machine");
        assert_eq!(fake.killed_by(), Some(Some(own)));
    }

    #[test]
    fn a_kill_that_only_the_group_of_the_process_counts_is_one() {
        let fake = Fake::new();
        fs::create_dir(fake.group("pods/pod/machine/machine")).unwrap();
        fake.count("pods/pod/machine/machine", 0, 0);
        fake.begin();
        assert_eq!(fake.killed_by(), None);
        // The limit is that of the group above, which counts it itself.
        fake.count("pods/pod/machine", 1, 0);
        fake.count("pods/pod/machine/machine", 0, 1);
        let own = fake.group("pods/pod/machine");
        assert_eq!(fake.killed_by(), Some(Some(own)));
    }

    #[test]
    fn a_full_group_that_killed_nothing_of_the_sandbox_has_not_ended_it() {
        let fake = Fake::new();
        fake.begin();
        fake.count("pods/pod", 1, 1);
        fake.count("pods/pod/machine", 1, 0);
        assert_eq!(fake.killed_by(), None);
    }

    #[test]
    fn of_a_sandbox_without_a_note_the_kill_alone_is_known() {
        let fake = Fake::new();
        fake.count("pods/pod", 3, 3);
        fake.count("pods/pod/machine", 0, 1);
        assert_eq!(fake.killed_by(), Some(None));
        fs::write(fake.dir.path().join(BEFORE), "no JSON").unwrap();
        assert_eq!(fake.killed_by(), Some(None));
    }

    #[test]
    fn a_group_that_is_gone_has_killed_nothing() {
        let fake = Fake::new();
        fake.begin();
        fs::remove_dir_all(fake.group("pods/pod/machine")).unwrap();
        assert_eq!(fake.killed_by(), None);
    }
}

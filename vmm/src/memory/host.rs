//! The maximum amount of memory of this process.

use std::fs;
use std::path::{Path, PathBuf};

use super::MemorySize;

/// Where the unified control group hierarchy is mounted.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";

/// Returns the host's memory, or the limit of this process's control groups if that is lower.
pub(crate) fn host_memory() -> MemorySize {
    let info = rustix::system::sysinfo();
    let total = info.totalram.saturating_mul(u64::from(info.mem_unit));
    let limit = fs::read_to_string("/proc/self/cgroup")
        .ok()
        .and_then(|text| cgroup_limit(Path::new(CGROUP_ROOT), &text));
    MemorySize::bytes(limit.map_or(total, |limit| limit.min(total)))
}

/// Returns the smallest `memory.max` from the group that `/proc/self/cgroup` names up to the root.
/// (Version 1 hierarchies are ignored.)
fn cgroup_limit(root: &Path, own: &str) -> Option<u64> {
    let own = own.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let group: PathBuf = root.join(own);
    group
        .ancestors()
        .take_while(|group| group.starts_with(root))
        .filter_map(|group| fs::read_to_string(group.join("memory.max")).ok())
        // "max" means unlimited.
        .filter_map(|text| text.trim().parse().ok())
        .min()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tightest_control_group_counts() {
        let root = tempfile::tempdir().unwrap();
        let put = |group: &str, limit: &str| {
            let dir = root.path().join(group);
            fs::create_dir_all(&dir).unwrap();
            fs::write(dir.join("memory.max"), limit).unwrap();
        };
        put("a", "5000\n");
        put("a/b", "max\n");
        put("a/b/c", "7000\n");
        put("other", "1\n");
        let limit = |own: &str| cgroup_limit(root.path(), own);
        assert_eq!(limit("0::/a/b/c\n"), Some(5000));
        assert_eq!(limit("4:memory:/other\n0::/a/b\n"), Some(5000));
        assert_eq!(limit("0::/\n"), None);
        assert_eq!(limit("0::/gone\n"), None);
        assert_eq!(limit("4:memory:/other\n"), None);
    }

    #[test]
    fn there_is_some_memory() {
        assert!(host_memory() > MemorySize::MIN);
    }
}

//! The host's kernel, and what sandboxes use of the host besides KVM.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

use rustix::system::uname;

use super::{Item, Status};

/// With less, a single small guest barely fits.
const MEMORY_LOW_KIB: u64 = 512 * 1024;

/// The oldest Linux that podvisor supports.
const LINUX: (u32, u32) = (6, 1);

/// The first Linux that can set attributes of detached mounts (`mount_setattr`).
const MOUNT_ATTRIBUTES: (u32, u32) = (5, 12);

/// Reports on the kernel, networking, cgroups, huge pages and memory.
pub(super) fn check(items: &mut Vec<Item>) {
    items.push(linux(&uname().release().to_string_lossy()));
    let tun = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/net/tun");
    items.push(tun_device(tun.map(drop)));
    items.push(cgroup_v2(Path::new("/sys/fs/cgroup")));
    let thp = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    items.push(huge_pages(thp.ok().as_deref()));
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    items.push(memory(&meminfo));
    let overcommit = fs::read_to_string("/proc/sys/vm/overcommit_memory");
    items.extend(strict_overcommit(&overcommit.unwrap_or_default()));
    let tdp_mmu = fs::read_to_string("/sys/module/kvm/parameters/tdp_mmu");
    items.extend(old_mmu(&tdp_mmu.unwrap_or_default()));
}

/// What it costs where the kernel counts what a process may use.
fn strict_overcommit(mode: &str) -> Option<Item> {
    const STRICT: &str = "2";
    (mode.trim() == STRICT).then(|| {
        Item::bad(
            "memory overcommit",
            Status::Warning,
            "vm.overcommit_memory is 2: memory that guests have not touched, and what they may \
             grow by, counts as used",
            "sudo sysctl vm.overcommit_memory=1, or let guests grow by less",
        )
    })
}

/// What it costs where KVM keeps a record of each page that a guest may have.
fn old_mmu(tdp_mmu: &str) -> Option<Item> {
    (tdp_mmu.trim() == "N").then(|| {
        Item::bad(
            "TDP MMU",
            Status::Warning,
            "KVM's is off: each GiB that a guest has, or may grow by, takes 2 MiB of memory",
            "load kvm with tdp_mmu=1 (the default since Linux 5.15), or let guests grow by less",
        )
    })
}

/// Returns the version of a release, which looks like `6.1.0-13-amd64`.
pub(super) fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    let mut number = || numbers.next()?.parse().ok();
    Some((number()?, number()?))
}

fn linux(release: &str) -> Item {
    const NAME: &str = "Linux";
    let (status, found) = match version(release) {
        Some(version) if version >= LINUX => return Item::ok(NAME, release),
        Some(version) if version < MOUNT_ATTRIBUTES => (
            Status::Missing,
            format!("{release}: no volumes (mount_setattr), and older than what podvisor is for"),
        ),
        Some(_) => (
            Status::Warning,
            format!("{release}: older than what podvisor is made for and tested with"),
        ),
        None => (
            Status::Warning,
            format!("{release:?}: not a release that is known"),
        ),
    };
    Item::bad(NAME, status, found, "boot Linux 6.1 or newer")
}

fn tun_device(opened: io::Result<()>) -> Item {
    const NAME: &str = "/dev/net/tun";
    match opened {
        Ok(()) => Item::ok(NAME, "can be opened"),
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Item::bad(
            NAME,
            Status::Missing,
            "permission denied: guests get no network",
            "run as root, or let your group use it",
        ),
        Err(error) => Item::bad(
            NAME,
            Status::Missing,
            format!("guests get no network: {error}"),
            "sudo modprobe tun; in a container, pass --device /dev/net/tun",
        ),
    }
}

fn cgroup_v2(root: &Path) -> Item {
    const NAME: &str = "cgroup v2";
    const WANTED: [&str; 3] = ["cpu", "memory", "pids"];
    let Ok(controllers) = fs::read_to_string(root.join("cgroup.controllers")) else {
        return Item::bad(
            NAME,
            Status::Missing,
            format!("not mounted on {}: sandboxes get no limits", root.display()),
            "boot with systemd.unified_cgroup_hierarchy=1",
        );
    };
    let has = |name: &str| controllers.split_whitespace().any(|c| c == name);
    let missing: Vec<_> = WANTED.into_iter().filter(|name| !has(name)).collect();
    if missing.is_empty() {
        Item::ok(NAME, controllers.trim())
    } else {
        Item::bad(
            NAME,
            Status::Warning,
            format!(
                "mounted without {}: sandboxes get no limits for it",
                missing.join(", ")
            ),
            "enable the controllers in the kernel, and in the parent's cgroup.subtree_control",
        )
    }
}

/// The file looks like `always [madvise] never`.
fn huge_pages(enabled: Option<&str>) -> Item {
    const NAME: &str = "transparent huge pages";
    let chosen = enabled.and_then(|text| text.split('[').nth(1)?.split(']').next());
    match chosen {
        Some(mode @ ("always" | "madvise")) => Item::ok(NAME, mode),
        Some(mode) => Item::bad(
            NAME,
            Status::Warning,
            format!("{mode}: guests boot and run slower"),
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        None => Item::bad(
            NAME,
            Status::Warning,
            "not offered by this kernel: guests boot and run slower",
            "use a kernel with CONFIG_TRANSPARENT_HUGEPAGE",
        ),
    }
}

fn memory(meminfo: &str) -> Item {
    const NAME: &str = "memory";
    let available = meminfo
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| {
            rest.trim()
                .trim_end_matches("kB")
                .trim()
                .parse::<u64>()
                .ok()
        });
    match available {
        Some(kib) if kib >= MEMORY_LOW_KIB => {
            Item::ok(NAME, format!("{} MiB available", kib / 1024))
        }
        Some(kib) => Item::bad(
            NAME,
            Status::Warning,
            format!("only {} MiB available", kib / 1024),
            "stop something, or give guests little memory (--memory)",
        ),
        None => Item::bad(
            NAME,
            Status::Warning,
            "unknown: /proc/meminfo has no MemAvailable",
            "mount /proc",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_old_kernel_is_named_with_what_it_costs() {
        let status = |release| linux(release).status;
        for new in ["6.1", "6.1.0-13-amd64", "6.18.44-rc1", "10.0.0"] {
            assert_eq!(status(new), Status::Ok, "{new}");
        }
        for old in [
            "6.0.19",
            "5.12.0",
            "5.15.0-91-generic",
            "5.14.0-362.el9",
            "x",
            "",
        ] {
            assert_eq!(status(old), Status::Warning, "{old}");
        }
        let item = linux("4.18.0-513.el8.x86_64");
        assert_eq!(item.status, Status::Missing);
        assert!(item.found.contains("volumes"), "{}", item.found);
        assert!(item.remedy.unwrap().contains("6.1"));
    }

    #[test]
    fn the_chosen_huge_page_mode_is_the_one_in_brackets() {
        let status = |text| huge_pages(text).status;
        assert_eq!(status(Some("always [madvise] never\n")), Status::Ok);
        assert_eq!(status(Some("[always] madvise never\n")), Status::Ok);
        assert_eq!(status(Some("always madvise [never]\n")), Status::Warning);
        assert_eq!(status(Some("garbage")), Status::Warning);
        assert_eq!(status(None), Status::Warning);
    }

    #[test]
    fn memory_that_is_only_promised_is_warned_of_where_it_costs() {
        assert!(
            ["0\n", "1\n", ""]
                .map(strict_overcommit)
                .iter()
                .all(Option::is_none)
        );
        assert!(["Y\n", ""].map(old_mmu).iter().all(Option::is_none));
        for item in [strict_overcommit("2\n"), old_mmu("N\n")] {
            assert_eq!(item.unwrap().status, Status::Warning);
        }
    }

    #[test]
    fn little_memory_is_warned_of() {
        let text = |kib: u64| format!("MemTotal: 99 kB\nMemAvailable:   {kib} kB\n");
        assert_eq!(memory(&text(1 << 21)).status, Status::Ok);
        assert_eq!(memory(&text(1 << 17)).status, Status::Warning);
        assert_eq!(memory("").status, Status::Warning);
    }

    #[test]
    fn a_hierarchy_without_the_memory_controller_is_named() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(cgroup_v2(dir.path()).status, Status::Missing);
        let file = dir.path().join("cgroup.controllers");
        fs::write(&file, "cpuset cpu io pids\n").unwrap();
        assert!(cgroup_v2(dir.path()).found.contains("memory"));
        fs::write(&file, "cpuset cpu io memory pids\n").unwrap();
        assert_eq!(cgroup_v2(dir.path()).status, Status::Ok);
    }

    #[test]
    fn a_missing_tun_device_costs_the_network_and_not_the_guest() {
        let item = tun_device(Err(io::ErrorKind::NotFound.into()));
        assert_eq!(item.status, Status::Missing);
        assert!(!item.prevents_guests());
        assert_eq!(tun_device(Ok(())).status, Status::Ok);
    }
}

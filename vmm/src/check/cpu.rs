//! What guests can do to each other because of faults of the processor, as the host's kernel says.

use std::fs;
use std::path::Path;

use rustix::system::uname;

use super::{Item, Status, host};

/// The kernel's reports, one file for each vulnerability that it knows.
const VULNERABILITIES: &str = "/sys/devices/system/cpu/vulnerabilities";

/// The vulnerabilities by which a guest could read memory of other guests or of the host, by the
/// names of their files.
const LEAKS: [&str; 13] = [
    "gather_data_sampling",
    "indirect_target_selection",
    "l1tf",
    "mds",
    "mmio_stale_data",
    "reg_file_data_sampling",
    "retbleed",
    "spec_rstack_overflow",
    "spectre_v2",
    "srbds",
    "tsa",
    "tsx_async_abort",
    "vmscape",
];

/// The first Linux whose KVM knows `nx_huge_pages=never`.
const NEVER: (u32, u32) = (6, 5);

/// Reports on the processor.
pub(super) fn check(items: &mut Vec<Item>) {
    let directory = Path::new(VULNERABILITIES);
    items.extend(leaks(directory));
    let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
    let release = uname().release().to_string_lossy().into_owned();
    items.extend(huge_pages_of_code(
        &read(&directory.join("itlb_multihit")),
        &read(Path::new("/sys/module/kvm/parameters/nx_huge_pages")),
        host::version(&release) >= Some(NEVER),
    ));
}

/// Names what guests could read each other's memory by.
fn leaks(directory: &Path) -> Vec<Item> {
    let leak = |name: &&'static str| {
        let report = fs::read_to_string(directory.join(name)).ok()?;
        leak(name, report.trim())
    };
    LEAKS.iter().filter_map(leak).collect()
}

/// A report looks like `Mitigation: Clear CPU buffers; SMT vulnerable`, or `Vulnerable: No
/// microcode`.
fn leak(name: &'static str, report: &str) -> Option<Item> {
    // Not so what the kernel leaves to itself, but does for guests: `Mitigation: Vulnerable, KVM:
    // Not affected`, `BHI: Vulnerable, KVM: SW loop`.
    let text = report.to_lowercase().replace("vulnerable, kvm:", "");
    if !text.contains("vulnerable") {
        return None;
    }
    let remedy = if text.contains("microcode") {
        "install the processor's microcode (Debian: intel-microcode or amd64-microcode), or a \
         newer firmware, then reboot"
    } else if text.contains("smt vulnerable") {
        "boot with nosmt, or run only guests on this host that may read each other's memory"
    } else {
        "boot a kernel that mitigates it, without mitigations=off, or run only guests on this host \
         that may read each other's memory"
    };
    let found = format!("a guest could read memory of others or of the host: {report}");
    Some(Item::bad(name, Status::Warning, found, remedy))
}

/// What KVM's protection from iTLB multihit costs, or that it is missing. `parameter` is empty
/// where KVM has none.
fn huge_pages_of_code(multihit: &str, parameter: &str, knows_never: bool) -> Option<Item> {
    const NAME: &str = "KVM nx_huge_pages";
    let is_affected = !multihit.trim().eq_ignore_ascii_case("not affected");
    let value = parameter.trim();
    if multihit.is_empty() {
        return None;
    }
    match (is_affected, value) {
        (true, "Y" | "auto") => Some(Item::ok(
            NAME,
            format!(
                "{value}, which this processor needs: guests run their code from small pages, and \
                 each start of one waits for a thread of KVM's"
            ),
        )),
        (true, "N" | "never") => Some(Item::bad(
            NAME,
            Status::Warning,
            format!("{value}: a guest could hang this processor (iTLB multihit)"),
            "options kvm nx_huge_pages=auto in /etc/modprobe.d, then load kvm again",
        )),
        (false, "Y" | "N" | "auto") if knows_never => Some(Item::bad(
            NAME,
            Status::Warning,
            format!(
                "{value}: each start of a guest waits for a thread of KVM's that this processor \
                 does not need"
            ),
            "options kvm nx_huge_pages=never in /etc/modprobe.d, then load kvm again",
        )),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports of kernels, and what their remedies name; `None` if guests are safe.
    const REPORTS: [(&str, &str, Option<&str>); 14] = [
        ("l1tf", "Not affected", None),
        (
            "l1tf",
            "Mitigation: PTE Inversion; VMX: conditional cache flushes, SMT vulnerable",
            Some("nosmt"),
        ),
        (
            "l1tf",
            "Mitigation: PTE Inversion; VMX: vulnerable",
            Some("mitigations=off"),
        ),
        (
            "mds",
            "Mitigation: Clear CPU buffers; SMT Host state unknown",
            None,
        ),
        (
            "mds",
            "Vulnerable: Clear CPU buffers attempted, no microcode; SMT vulnerable",
            Some("microcode"),
        ),
        ("tsx_async_abort", "Vulnerable", Some("mitigations=off")),
        (
            "mmio_stale_data",
            "Mitigation: Clear CPU buffers; SMT vulnerable",
            Some("nosmt"),
        ),
        ("vmscape", "Vulnerable", Some("mitigations=off")),
        (
            "spec_rstack_overflow",
            "Vulnerable: Safe RET, no microcode",
            Some("microcode"),
        ),
        ("spec_rstack_overflow", "Mitigation: safe RET", None),
        (
            "retbleed",
            "Mitigation: untrained return thunk; SMT vulnerable",
            Some("nosmt"),
        ),
        (
            "indirect_target_selection",
            "Mitigation: Vulnerable, KVM: Not affected",
            None,
        ),
        (
            "spectre_v2",
            "Mitigation: Enhanced / Automatic IBRS; BHI: Vulnerable, KVM: SW loop",
            None,
        ),
        ("srbds", "Vulnerable: No microcode", Some("microcode")),
    ];

    #[test]
    fn what_guests_could_read_each_other_by_is_named_with_a_remedy() {
        for (file, report, remedy) in REPORTS {
            let directory = tempfile::tempdir().unwrap();
            fs::write(directory.path().join(file), format!("{report}\n")).unwrap();
            // Not by this one.
            fs::write(directory.path().join("meltdown"), "Vulnerable\n").unwrap();
            let items = leaks(directory.path());
            assert_eq!(items.len(), usize::from(remedy.is_some()), "{items:?}");
            for (item, remedy) in items.iter().zip(remedy) {
                assert_eq!(item.status, Status::Warning);
                assert!(!item.prevents_guests());
                assert!(item.found.ends_with(report), "{item:?}");
                assert!(item.remedy.as_ref().unwrap().contains(remedy), "{item:?}");
            }
        }
    }

    #[test]
    fn a_guest_of_a_kernel_that_reports_nothing_is_not_warned_of() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(leaks(directory.path()), []);
        assert_eq!(huge_pages_of_code("", "N\n", true), None);
    }

    #[test]
    fn splitting_huge_pages_is_for_processors_that_need_it() {
        let item = |multihit, parameter| huge_pages_of_code(multihit, parameter, true);
        let remedy = |item: Option<Item>| item.unwrap().remedy.unwrap();
        for value in ["N\n", "Y\n"] {
            assert!(remedy(item("Not affected\n", value)).contains("=never"));
            assert_eq!(huge_pages_of_code("Not affected\n", value, false), None);
        }
        assert_eq!(item("Not affected\n", "never\n"), None);
        assert_eq!(item("Not affected\n", ""), None);
        let needed = item("KVM: Mitigation: Split huge pages\n", "Y\n").unwrap();
        assert_eq!((needed.status, needed.remedy), (Status::Ok, None));
        for value in ["N\n", "never\n"] {
            assert!(remedy(item("KVM: Vulnerable\n", value)).contains("=auto"));
        }
    }
}

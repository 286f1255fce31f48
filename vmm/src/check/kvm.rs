//! `/dev/kvm`, its capabilities, and the hardware support below it.

use std::fs;
use std::path::Path;

use kvm_ioctls::{Cap, Kvm};

use super::{Item, Status};

/// The only version since Linux 2.6.22.
const API_VERSION: i32 = 12;

/// The capabilities that a VM uses, by their names in the kernel's documentation.
const CAPABILITIES: &[(Cap, &str)] = &[
    (Cap::UserMemory, "KVM_CAP_USER_MEMORY"),
    (Cap::Irqchip, "KVM_CAP_IRQCHIP"),
    (Cap::TscDeadlineTimer, "KVM_CAP_TSC_DEADLINE_TIMER"),
    (Cap::IrqRouting, "KVM_CAP_IRQ_ROUTING"),
    (Cap::Irqfd, "KVM_CAP_IRQFD"),
    (Cap::Ioeventfd, "KVM_CAP_IOEVENTFD"),
    (Cap::SignalMsi, "KVM_CAP_SIGNAL_MSI"),
    (Cap::ExtCpuid, "KVM_CAP_EXT_CPUID"),
    (Cap::MpState, "KVM_CAP_MP_STATE"),
    (Cap::SetTssAddr, "KVM_CAP_SET_TSS_ADDR"),
    (Cap::SetIdentityMapAddr, "KVM_CAP_SET_IDENTITY_MAP_ADDR"),
    (Cap::ImmediateExit, "KVM_CAP_IMMEDIATE_EXIT"),
];

/// The capabilities that make guests faster, or make it possible to save them.
const HELPFUL: &[(Cap, &str, &str)] = &[
    (
        Cap::GetTscKhz,
        "KVM_CAP_GET_TSC_KHZ",
        "guests measure their clock at boot",
    ),
    (Cap::AdjustClock, "KVM_CAP_ADJUST_CLOCK", "no snapshots"),
    (Cap::Xsave, "KVM_CAP_XSAVE", "no snapshots"),
];

/// Reports on KVM; `false` if it cannot even be opened.
pub(super) fn check(items: &mut Vec<Item>) -> bool {
    let kvm = match Kvm::new() {
        Ok(kvm) => kvm,
        Err(error) => {
            let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
            items.push(unopened(error.errno(), &cpuinfo));
            return false;
        }
    };
    items.push(Item::ok("/dev/kvm", "can be opened").required());

    let version = kvm.get_api_version();
    items.push(if version == API_VERSION {
        Item::ok("KVM API", "version 12").required()
    } else {
        let found = format!("version {version}");
        Item::bad(
            "KVM API",
            Status::Broken,
            found,
            "use a kernel of this century",
        )
        .required()
    });

    let missing: Vec<_> = CAPABILITIES
        .iter()
        .filter(|(cap, _)| !kvm.check_extension(*cap))
        .collect();
    if missing.is_empty() {
        let found = format!("all {} that guests need", CAPABILITIES.len());
        items.push(Item::ok("KVM capabilities", found).required());
    }
    items.extend(missing.into_iter().map(|(_, name)| {
        let remedy = "use a newer kernel, or one that is built with it";
        Item::bad(name, Status::Missing, "not offered by this KVM", remedy).required()
    }));
    for (_, name, loss) in HELPFUL
        .iter()
        .filter(|(cap, ..)| !kvm.check_extension(*cap))
    {
        let found = format!("not offered by this KVM: {loss}");
        items.push(Item::bad(
            name,
            Status::Warning,
            found,
            "use a newer kernel",
        ));
    }
    items.push(Item::ok(
        "vCPUs",
        format!(
            "{} at most, {} advised",
            kvm.get_max_vcpus(),
            kvm.get_nr_vcpus()
        ),
    ));
    items.push(nested_paging(Path::new("/sys/module")));
    true
}

/// Reports why `/dev/kvm` did not open, and what helps.
fn unopened(errno: i32, cpuinfo: &str) -> Item {
    let has = |flag: &str| {
        cpuinfo
            .lines()
            .filter(|line| line.starts_with("flags"))
            .any(|line| line.split_whitespace().any(|word| word == flag))
    };
    let module = match (has("vmx"), has("svm")) {
        (true, _) => Some("kvm_intel"),
        (_, true) => Some("kvm_amd"),
        _ => None,
    };
    let (status, found, remedy) = match (errno, module) {
        (libc::EACCES | libc::EPERM, _) => (
            Status::Missing,
            "permission denied".to_owned(),
            "add your user to the group kvm and log in again: sudo usermod -aG kvm $USER".to_owned(),
        ),
        (libc::ENOENT | libc::ENODEV | libc::ENXIO, Some(module)) => (
            Status::Missing,
            "not there, though the processor could".to_owned(),
            format!(
                "sudo modprobe {module}; if that says \"not supported\", turn virtualisation on in the firmware; \
                 in a container, pass --device /dev/kvm"
            ),
        ),
        (libc::ENOENT | libc::ENODEV | libc::ENXIO, None) => (
            Status::Missing,
            "not there, and the processor shows neither VT-x nor AMD-V".to_owned(),
            "turn virtualisation on in the firmware, or, in a virtual machine, nested virtualisation".to_owned(),
        ),
        (errno, _) => (
            Status::Broken,
            format!("cannot be opened: {}", std::io::Error::from_raw_os_error(errno)),
            "look for kvm in the kernel's log: sudo dmesg | grep -i kvm".to_owned(),
        ),
    };
    Item::bad("/dev/kvm", status, found, remedy).required()
}

/// Two-dimensional page tables: without them each change of a guest's page tables costs exits.
fn nested_paging(modules: &Path) -> Item {
    const NAME: &str = "nested paging";
    for (module, parameter) in [("kvm_intel", "ept"), ("kvm_amd", "npt")] {
        let path = modules.join(module).join("parameters").join(parameter);
        let Ok(value) = fs::read_to_string(path) else {
            continue;
        };
        return if matches!(value.trim(), "Y" | "1") {
            Item::ok(NAME, format!("{parameter} on ({module})"))
        } else {
            Item::bad(
                NAME,
                Status::Warning,
                format!("{parameter} off ({module}): guests are several times slower"),
                format!(
                    "reload the module: sudo modprobe -r {module} && sudo modprobe {module} {parameter}=1"
                ),
            )
        };
    }
    let other = fs::read_dir(modules).ok().and_then(|entries| {
        entries
            .filter_map(Result::ok)
            .filter_map(|entry| entry.file_name().into_string().ok())
            .find(|name| name.starts_with("kvm_"))
    });
    let found = match other {
        Some(name) => format!("unknown: KVM is {name}, neither kvm_intel nor kvm_amd"),
        None => "unknown: KVM's parameters cannot be read".to_owned(),
    };
    let remedy = "run on a processor with VT-x or AMD-V, or with nested virtualisation";
    Item::bad(NAME, Status::Warning, found, remedy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_way_of_not_opening_has_its_own_remedy() {
        let intel = "processor: 0\nflags\t\t: fpu vmx sse2\n";
        let remedy = |errno, cpuinfo| unopened(errno, cpuinfo).remedy.unwrap();
        assert!(remedy(libc::EACCES, intel).contains("usermod -aG kvm"));
        assert!(remedy(libc::ENOENT, intel).contains("modprobe kvm_intel"));
        assert!(remedy(libc::ENOENT, "flags: svm\n").contains("modprobe kvm_amd"));
        assert!(remedy(libc::ENOENT, "flags: fpu\n").contains("nested virtualisation"));
        assert!(remedy(libc::EBUSY, intel).contains("dmesg"));
        assert!(unopened(libc::ENOENT, "").prevents_guests());
    }

    #[test]
    fn nested_paging_is_read_from_whichever_module_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let none = nested_paging(dir.path());
        assert_eq!(none.status, Status::Warning);

        let parameters = dir.path().join("kvm_amd/parameters");
        fs::create_dir_all(&parameters).unwrap();
        fs::write(parameters.join("npt"), "1\n").unwrap();
        assert_eq!(nested_paging(dir.path()).status, Status::Ok);
        fs::write(parameters.join("npt"), "0\n").unwrap();
        let off = nested_paging(dir.path());
        assert_eq!(off.status, Status::Warning);
        assert!(off.remedy.unwrap().contains("kvm_amd npt=1"));
    }

    #[test]
    fn a_foreign_kvm_module_is_named() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("kvm_soft")).unwrap();
        assert!(nested_paging(dir.path()).found.contains("kvm_soft"));
    }
}

//! Mistakes that a builder refuses without KVM.

use std::io::Write as _;

use podvisor_devices::blk::{BlockDevice, BlockDeviceError};
use podvisor_devices::mem::{MemDevice, MemRegion};
use podvisor_devices::vsock::VsockDevice;

use super::boot::{ValidBoot, has_parameter, with_parameters};
use super::*;
use crate::boot::Kernel;
use crate::layout;
use crate::memory::{self, MemorySize, PAGE_SIZE};
use crate::transport::Transport;
use crate::vm::error::{BuildError, ConfigError, ConfigErrors};
use crate::vm::lifecycle::Vm;

#[test]
fn parameters_go_before_the_arguments_of_init() {
    let devices = ["virtio_mmio.device=4K@0xc0000000:5".to_owned()];
    assert_eq!(with_parameters("", &devices), devices[0]);
    assert_eq!(
        with_parameters("quiet", &devices),
        format!("quiet {}", devices[0])
    );
    assert_eq!(
        with_parameters("quiet -- sh -c true", &devices),
        format!("quiet {} -- sh -c true", devices[0])
    );
}

#[test]
fn parameters_of_init_are_none_of_the_kernels() {
    let added = ["pci=conf1".to_owned()];
    assert_eq!(with_parameters("-- x", &added), "pci=conf1 -- x");
    assert_eq!(with_parameters("-- x", &[]), "-- x");
    for (line, has) in [
        ("maxcpus=1", true),
        ("quiet maxcpus=1 -- app", true),
        ("quiet -- app maxcpus=1", false),
        ("-- app maxcpus=1", false),
        ("xmaxcpus=1 maxcpus1", false),
    ] {
        assert_eq!(has_parameter(line, "maxcpus"), has, "{line}");
    }
}

#[test]
fn all_mistakes_are_reported_at_once() {
    let mut builder = Vm::builder()
        .vcpus(0)
        .cmdline("tab\t")
        .memory(MemorySize::bytes(5000))
        .hotplug_memory(MemorySize::mib(100))
        .block(BlockDevice::new(Box::new(NoDisk)));
    builder
        .parts
        .broken_disks
        .push(BlockDeviceError::NotADisk { path: "/x".into() });
    for _ in 0..Transport::Mmio.max_devices() {
        builder = builder.device(BlockDevice::new(Box::new(NoDisk)));
    }
    let Err(BuildError::Config(errors)) = builder.validate(8) else {
        panic!("accepted")
    };
    let text = errors.to_string();
    for part in [
        "no kernel",
        "0 vCPUs",
        "5000 bytes",
        "100 MiB of memory to plug in",
        "21 virtio devices",
        "disk /x",
        "control character '\\t'",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    let mut builder = Vm::builder().memory(MemorySize::gib(1 << 20));
    let Err(BuildError::Config(errors)) = builder.validate(8) else {
        panic!("accepted")
    };
    assert!(
        errors.to_string().contains("this process may have"),
        "{errors}"
    );
}

#[derive(Debug)]
struct NoDisk;
impl podvisor_devices::blk::Disk for NoDisk {
    fn len(&self) -> u64 {
        0
    }
    fn submit(
        &mut self,
        _: &podvisor_devices::GuestRam,
        _: u16,
        _: podvisor_devices::blk::Operation<'_, '_>,
    ) -> podvisor_devices::blk::Submitted {
        podvisor_devices::blk::Submitted::Done(Ok(()))
    }
}

fn mistakes(result: Result<impl Sized, BuildError>) -> Vec<ConfigError> {
    match result.map(drop) {
        Err(BuildError::Config(ConfigErrors(errors))) => errors,
        other => panic!("{other:?}"),
    }
}

#[test]
fn ids_that_devices_cannot_have_are_told_each_with_its_reason() {
    let disk = || BlockDevice::new(Box::new(NoDisk));
    let mut builder = Vm::builder();
    for id in ["root", "a b", "blk0", "root"] {
        builder = builder.device_as(id, disk());
    }
    let errors = mistakes(builder.validate(8)).into_iter();
    let errors = errors.filter(|error| matches!(error, ConfigError::DeviceId { .. }));
    let told: Vec<String> = errors.map(|error| error.to_string()).collect();
    assert_eq!(told.len(), 3, "{told:?}");
    for (told, parts) in told.iter().zip([
        ["\"a b\"", "letters"],
        ["\"blk0\"", "without an id"],
        ["\"root\"", "another device"],
    ]) {
        assert!(parts.iter().all(|part| told.contains(part)), "{told}");
    }
}

#[test]
fn too_many_vcpus_are_told_once() {
    let errors = mistakes(Vm::builder().vcpus(200).validate(8));
    assert!(
        matches!(&*errors, [ConfigError::NoKernel, ConfigError::Vcpus { .. }]),
        "{errors:?}"
    );
    let errors = mistakes(Vm::builder().vcpus(2).max_vcpus(1).validate(8));
    assert!(
        matches!(
            &*errors,
            [ConfigError::NoKernel, ConfigError::MaxVcpus { .. }]
        ),
        "{errors:?}"
    );
}

/// A kernel, which is not executed.
fn kernel() -> Kernel {
    let elf = crate::boot::testing::Elf::new(&[0xf4], 0).with_pvh(1 << 20);
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(&elf.bytes()).unwrap();
    Kernel::from_file(file).unwrap()
}

fn accepted(builder: VmBuilder, max_vcpus: u8) -> ValidBoot {
    let mut builder = builder.kernel(kernel());
    builder.validate(max_vcpus).unwrap()
}

#[test]
fn all_that_just_fits_is_accepted() {
    let least = accepted(Vm::builder().vcpus(8).memory(MemorySize::MIN), 8);
    assert_eq!((least.vcpus, least.max_vcpus), (8, 8));
    assert_eq!(least.memory.boot, MemorySize::MIN);
    let same = accepted(Vm::builder().vcpus(2).max_vcpus(2), 8);
    assert_eq!((same.vcpus, same.max_vcpus), (2, 2));
    let most = accepted(Vm::builder().max_vcpus(8), 8);
    assert_eq!((most.vcpus, most.max_vcpus), (1, 8));
    // Nineteen interrupt lines, and 31 places next to the bridge.
    for (transport, count) in [(Transport::Mmio, 19), (Transport::Pci, 31)] {
        let full = |count: usize| {
            let builder = Vm::builder().transport(transport);
            (0..count).fold(builder, |builder, _| builder.rng())
        };
        accepted(full(count), 8);
        accepted(full(count - 1).hotplug_memory(MemorySize::mib(128)), 8);
        for more in [
            full(count + 1),
            full(count).hotplug_memory(MemorySize::mib(128)),
        ] {
            let errors = mistakes(more.kernel(kernel()).validate(8));
            assert!(
                matches!(&*errors, [ConfigError::TooManyDevices { count: there, .. }]
                    if *there == count + 1),
                "{errors:?}"
            );
        }
    }
}

#[test]
fn what_is_just_too_much_or_too_little_is_refused() {
    let refused = |builder: VmBuilder| {
        let errors = mistakes(builder.kernel(kernel()).validate(8));
        assert_eq!(errors.len(), 1, "{errors:?}");
        // The errors in the list are told with their causes.
        ConfigErrors(errors).to_string()
    };
    let vm = Vm::builder;
    assert_eq!(refused(vm().vcpus(9)), "9 vCPUs: this host takes 1 to 8");
    assert_eq!(
        refused(vm().max_vcpus(9)),
        "at most 9 vCPUs: it must be 1 to 8"
    );
    assert_eq!(
        refused(vm().vcpus(2).max_vcpus(1)),
        "at most 1 vCPUs: it must be 2 to 8"
    );
    let least = MemorySize::MIN.as_bytes();
    for size in [least - PAGE_SIZE, least + 1] {
        let error = refused(vm().memory(MemorySize::bytes(size)));
        assert!(error.contains("a multiple of 4 KiB is needed"), "{error}");
    }
    let region = MemRegion {
        start: 1 << 32,
        len: 128 << 20,
    };
    for hotplug in [0, 128].map(MemorySize::mib) {
        let memory = MemDevice::new(region).unwrap();
        let error = refused(vm().hotplug_memory(hotplug).device(memory));
        assert!(error.contains("call `.hotplug_memory(…)`"), "{error}");
    }
    let vsock = |cid| VsockDevice::in_process(cid).unwrap();
    let error = refused(vm().vsock(vsock(3)).rng().device(vsock(4)));
    assert!(error.starts_with("2 socket devices"), "{error}");
    accepted(vm().vsock(vsock(3)).rng(), 8);
    let error = refused(vm().cmdline("a".repeat(layout::CMDLINE_MAX)));
    assert!(error.starts_with("the kernel command line has"), "{error}");
    accepted(vm().cmdline("a".repeat(layout::CMDLINE_MAX - 1)), 8);
    let error = refused(vm().cmdline("quiet\nro"));
    assert!(error.contains("control character"), "{error}");
    let host = memory::host_memory();
    let more = host.as_bytes().next_multiple_of(PAGE_SIZE) + PAGE_SIZE;
    let error = refused(vm().memory(MemorySize::bytes(more)));
    assert!(error.contains("this process may have"), "{error}");
    let exactly = host.as_bytes() / PAGE_SIZE * PAGE_SIZE;
    accepted(vm().memory(MemorySize::bytes(exactly)), 8);
}

#[test]
fn what_is_printed_for_debugging_has_what_was_said() {
    let builder = Vm::builder().vcpus(3).cmdline("quiet").rng();
    let printed = format!("{builder:?}");
    for part in ["vcpus: Some(3)", "\"quiet\"", "RngDevice", "serial: false"] {
        assert!(printed.contains(part), "{part} in {printed}");
    }
}

#[test]
fn what_is_wrong_without_kvm_is_told_without_it() {
    let errors = mistakes(Vm::builder().vcpus(0).validate(u8::MAX));
    assert!(
        matches!(&*errors, [ConfigError::NoKernel, ConfigError::Vcpus { .. }]),
        "{errors:?}"
    );
}

#[test]
fn a_disk_among_devices_of_any_kind_is_checked_as_one() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(512).unwrap();
    let open = || BlockDevice::open(file.path()).unwrap();
    let read_only = std::fs::File::open(file.path()).unwrap();
    let builder = Vm::builder()
        .device(BlockDevice::from_file(read_only).unwrap())
        .device(open())
        .device(open());
    let errors: Vec<_> = builder.parts.broken_disks.iter().collect();
    assert!(
        matches!(
            &*errors,
            [
                BlockDeviceError::NotWritable { .. },
                BlockDeviceError::InUse { .. }
            ]
        ),
        "{errors:?}"
    );
}

#[test]
fn the_causes_of_a_mistake_are_told_with_it() {
    let mut builder = Vm::builder().kernel(kernel());
    builder.parts.broken_disks = vec![
        BlockDeviceError::NotWritable {
            path: "/x".into(),
            source: std::io::Error::from_raw_os_error(libc::ETXTBSY),
        },
        BlockDeviceError::InUse { path: "/y".into() },
    ];
    let told = ConfigErrors(mistakes(builder.validate(8))).to_string();
    assert!(
        told.starts_with(
            "the disk /x cannot be written: Text file busy (os error 26); the disk /y"
        ),
        "{told}"
    );
}

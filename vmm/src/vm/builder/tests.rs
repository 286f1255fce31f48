//! Mistakes that a builder refuses without KVM.

use super::*;

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
fn all_mistakes_are_reported_at_once() {
    let mut builder = Vm::builder()
        .vcpus(0)
        .memory(MemorySize::bytes(5000))
        .hotplug_memory(MemorySize::mib(100))
        .block(BlockDevice::new(Box::new(NoDisk)));
    builder
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

#[test]
fn what_is_wrong_without_kvm_is_told_without_it() {
    let errors = mistakes(Vm::builder().vcpus(0).check_without_kvm());
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
    let errors: Vec<_> = builder.broken_disks.iter().collect();
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

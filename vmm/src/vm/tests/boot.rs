//! What a guest finds in its memory when it starts.

use super::*;
use crate::vm::VmExit;
use crate::{Initramfs, Transport};

/// Returns the kernel's command line.
fn cmdline(builder: VmBuilder) -> String {
    let vm = builder.build().unwrap();
    let mut line = vec![0; layout::CMDLINE_MAX];
    assert_eq!(vm.read_memory(layout::CMDLINE, &mut line), line.len());
    let end = line.iter().position(|byte| *byte == 0).unwrap();
    String::from_utf8(line[..end].to_vec()).unwrap()
}

#[test]
fn the_command_line_is_the_owners_with_what_the_devices_and_cpus_need() {
    let vm = || tiny(OBEY).cmdline("quiet -- x");
    assert_eq!(cmdline(vm()), "quiet -- x");
    assert_eq!(
        cmdline(vm().rng().rng()),
        "quiet virtio_mmio.device=4K@0xc0000000:5 virtio_mmio.device=4K@0xc0001000:6 -- x"
    );
    assert_eq!(
        cmdline(vm().rng().transport(Transport::Pci)),
        "quiet pci=conf1 -- x"
    );

    assert_eq!(cmdline(vm().vcpus(2).max_vcpus(2)), "quiet -- x");
    assert_eq!(cmdline(vm().vcpus(2).max_vcpus(3)), "quiet maxcpus=2 -- x");
    let own = "quiet maxcpus=1";
    assert_eq!(cmdline(tiny(OBEY).cmdline(own).max_vcpus(3)), own);
    let of_init = tiny(OBEY).cmdline("quiet -- app maxcpus=1").max_vcpus(3);
    assert_eq!(cmdline(of_init), "quiet maxcpus=1 -- app maxcpus=1");
}

#[test]
fn memory_that_is_plugged_in_comes_online_unless_the_owner_says_otherwise() {
    let vm = |line: &str| {
        let vm = tiny(OBEY).cmdline(line).transport(Transport::Pci);
        cmdline(vm.hotplug_memory(MemorySize::mib(128)))
    };
    assert_eq!(
        vm("quiet"),
        "quiet pci=conf1 memhp_default_state=online memory_hotplug.online_policy=auto-movable"
    );
    assert_eq!(
        vm("memhp_default_state=offline"),
        "memhp_default_state=offline pci=conf1"
    );
}

#[test]
fn the_initramfs_is_where_the_kernel_is_told_that_it_is() {
    let content: Vec<u8> = (0..1000u32).flat_map(u32::to_le_bytes).collect();
    let initramfs = Initramfs::from_bytes(content.clone()).unwrap();
    let vm = tiny(OBEY).initramfs(initramfs).build().unwrap();
    let word = |at| {
        let mut word = [0; 8];
        assert_eq!(vm.read_memory(at, &mut word), 8);
        u64::from_le_bytes(word)
    };
    let (address, size) = (word(layout::PVH_MODULES), word(layout::PVH_MODULES + 8));
    assert_eq!(size, content.len() as u64);
    let mut there = vec![0; content.len()];
    assert_eq!(vm.read_memory(address, &mut there), there.len());
    assert!(there == content);
}

#[test]
fn a_guest_that_jumps_to_the_reset_vector_restarts() {
    let base = u32::try_from(LOAD).unwrap().to_le_bytes();
    let table = u32::try_from(LOAD + 40).unwrap().to_le_bytes();
    let table_register = u32::try_from(LOAD + 32).unwrap().to_le_bytes();
    let mut code = Vec::new();
    code.extend([0x0f, 0x01, 0x15]); // lgdt
    code.extend(table_register);
    code.extend([0xea, 14, 0, 0, 0, 8, 0]); // to the next instruction, in a segment of 16 bits
    code.extend([0x0f, 0x20, 0xc0]); // mov eax, cr0
    code.extend([0x24, 0xfe]); // clear PE
    code.extend([0x0f, 0x22, 0xc0]); // mov cr0, eax
    code.extend([0xea, 0xf0, 0xff, 0x00, 0xf0]); // jmp f000:fff0
    code.resize(32, 0);
    code.extend([15, 0]);
    code.extend(table);
    code.resize(48, 0);
    let [low, high, middle, top] = base;
    code.extend([0xff, 0xff, low, high, middle, 0x9a, 0, top]);
    let vm = Arc::new(tiny(&code).build().unwrap());
    vm.start().unwrap();
    let ended = vm.clone();
    assert_eq!(
        in_time("reset", move || ended.wait()).unwrap(),
        VmExit::Reset
    );
}

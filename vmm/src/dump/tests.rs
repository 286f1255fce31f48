//! Heads of dumps, read back by the specification, and by binutils.

use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::process::Command;

use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment, kvm_sregs};
use proptest::prelude::*;

use super::testing::{notes, segments, u16_at, u32_at, u64_at};
use super::*;

/// A vCPU each of whose registers has another value.
fn vcpu(seed: u64) -> DumpedVcpu {
    let value = |number: u64| seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number;
    let segment = |number: u64| kvm_segment {
        base: value(number),
        limit: 0xfffff,
        selector: number as u16 * 8,
        type_: 11,
        present: 1,
        dpl: 3,
        db: 0,
        s: 1,
        l: 1,
        g: 1,
        ..Default::default()
    };
    let table = |number: u64| kvm_dtable {
        base: value(number),
        limit: number as u16,
        ..Default::default()
    };
    DumpedVcpu {
        regs: kvm_regs {
            rax: value(1),
            rbx: value(2),
            rcx: value(3),
            rdx: value(4),
            rsi: value(5),
            rdi: value(6),
            rsp: value(7),
            rbp: value(8),
            r8: value(9),
            r9: value(10),
            r10: value(11),
            r11: value(12),
            r12: value(13),
            r13: value(14),
            r14: value(15),
            r15: value(16),
            rip: value(17),
            rflags: value(18),
        },
        sregs: kvm_sregs {
            cs: segment(20),
            ds: segment(21),
            es: segment(22),
            fs: segment(23),
            gs: segment(24),
            ss: segment(25),
            tr: segment(26),
            ldt: kvm_segment {
                unusable: 1,
                ..segment(27)
            },
            gdt: table(28),
            idt: table(29),
            cr0: value(30),
            cr2: value(31),
            cr3: value(32),
            cr4: value(33),
            ..Default::default()
        },
        kernel_gs_base: value(34),
    }
}

proptest! {
    #[test]
    fn a_dump_says_where_all_memory_is_and_has_each_vcpus_registers(
        seeds in proptest::collection::vec(any::<u64>(), 0..20),
        pages in proptest::collection::vec((0u64..1 << 30, 1u64..1 << 24), 0..4),
    ) {
        let vcpus: Vec<_> = seeds.iter().map(|seed| vcpu(*seed)).collect();
        let regions: Vec<_> = pages
            .iter()
            .map(|(start, len)| Region { start: start << 12, len: len << 12 })
            .collect();
        let head = head(&vcpus, &regions);
        prop_assert!(head.len().is_multiple_of(4096));
        prop_assert_eq!(&head[..7], b"\x7fELF\x02\x01\x01");
        prop_assert_eq!((u16_at(&head, 16), u16_at(&head, 18)), (4, 62));
        let segments = segments(&head);
        let (note_kind, notes_at, _, notes_len) = segments[0];
        prop_assert_eq!(note_kind, 4);
        let mut offset = head.len() as u64;
        let mut expected = Vec::new();
        for region in &regions {
            expected.push((1, offset, region.start, region.len));
            offset += region.len;
        }
        prop_assert_eq!(&segments[1..], expected);
        let notes = notes(&head[notes_at as usize..][..notes_len as usize]);
        prop_assert_eq!(notes.len(), 2 * vcpus.len());
        for (number, (pair, vcpu)) in notes.chunks(2).zip(&vcpus).enumerate() {
            let [(core, prstatus, thread), (qemu, own, state)] = pair else { unreachable!() };
            prop_assert_eq!((&**core, *prstatus, thread.len()), ("CORE", 1, 336));
            prop_assert_eq!((&**qemu, *own, state.len()), ("QEMU", 0, 440));
            prop_assert_eq!(u32_at(thread, 32) as usize, number + 1);
            let register = |number: usize| u64_at(thread, 112 + number * 8);
            prop_assert_eq!(register(0), vcpu.regs.r15);
            prop_assert_eq!(register(10), vcpu.regs.rax);
            prop_assert_eq!(register(16), vcpu.regs.rip);
            prop_assert_eq!(register(17), u64::from(vcpu.sregs.cs.selector));
            prop_assert_eq!(register(19), vcpu.regs.rsp);
            prop_assert_eq!(register(22), vcpu.sregs.gs.base);
            prop_assert_eq!(register(26), u64::from(vcpu.sregs.gs.selector));
            prop_assert_eq!((u32_at(state, 0), u32_at(state, 4)), (1, 440));
            prop_assert_eq!(u64_at(state, 8), vcpu.regs.rax);
            prop_assert_eq!(u64_at(state, 8 + 16 * 8), vcpu.regs.rip);
            // CS: 64-bit code of ring 3.
            prop_assert_eq!(u32_at(state, 152), u32::from(vcpu.sregs.cs.selector));
            prop_assert_eq!(u32_at(state, 160), 0x00a0_fb00);
            prop_assert_eq!(u64_at(state, 168), vcpu.sregs.cs.base);
            // The local descriptor table is not in use.
            prop_assert_eq!(u32_at(state, 152 + 6 * 24 + 8), 0);
            let (gdt, idt) = (152 + 8 * 24, 152 + 9 * 24);
            prop_assert_eq!(u64_at(state, gdt + 16), vcpu.sregs.gdt.base);
            prop_assert_eq!(u32_at(state, idt + 4), u32::from(vcpu.sregs.idt.limit));
            prop_assert_eq!(u64_at(state, idt + 16), vcpu.sregs.idt.base);
            prop_assert_eq!(u64_at(state, 392 + 3 * 8), vcpu.sregs.cr3);
            prop_assert_eq!(u64_at(state, 432), vcpu.kernel_gs_base);
        }
    }
}

#[test]
fn binutils_read_a_dump() {
    let regions = [(0, 1 << 16), (1 << 32, 1 << 12)];
    let regions = regions.map(|(start, len)| Region { start, len });
    let head = head(&[vcpu(1), vcpu(2)], &regions);
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&head).unwrap();
    let len = head.len() as u64 + (1 << 16) + (1 << 12);
    file.as_file().set_len(len).unwrap();
    file.as_file().write_all_at(b"x", len - 1).unwrap();
    let mut readelf = Command::new("readelf");
    let output = readelf.args(["-W", "-h", "-l", "-n"]).arg(file.path());
    let output = output.output().unwrap();
    let (said, complained) = (output.stdout, output.stderr);
    let said = String::from_utf8(said).unwrap();
    assert!(output.status.success(), "{said}");
    assert_eq!(String::from_utf8(complained).unwrap(), "");
    for expected in [
        "CORE (Core file)",
        "Advanced Micro Devices X86-64",
        "0x0000000100000000",
        "NT_PRSTATUS",
        "QEMU",
    ] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
    assert_eq!(said.matches("LOAD  ").count(), 2, "{said}");
}

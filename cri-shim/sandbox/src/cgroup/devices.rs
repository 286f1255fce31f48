//! Which devices the process of a group may open: a BPF program of the group's, since cgroup v2
//! has no files for that.
//!
//! The kernel asks it when a device is opened or made, whatever the mount that it is on: a volume
//! in which the host's later mounts appear may show device nodes in a mount without `nodev`. Files
//! that are open already are not asked about: disks, taps and terminals come open from a launcher.
#![allow(unsafe_code)] // bpf(2)

use std::fs::File;
use std::io;
use std::mem::size_of;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::path::Path;

/// What a process opens before its jail is closed, as major and minor numbers of character devices:
/// `null`, `random`, `urandom`, and `kvm`.
const ALLOWED: [(u32, u32); 4] = [(1, 3), (1, 8), (1, 9), (10, 232)];

/// Commands, types and flags of `bpf(2)` (linux/bpf.h).
const BPF_PROG_LOAD: libc::c_long = 5;
const BPF_PROG_ATTACH: libc::c_long = 8;
const BPF_PROG_TYPE_CGROUP_DEVICE: u32 = 15;
const BPF_CGROUP_DEVICE: u32 = 6;
/// Programs of groups above and below are asked, too, and each may deny.
const BPF_F_ALLOW_MULTI: u32 = 2;

/// Of `struct bpf_cgroup_dev_ctx`: `access_type` has the kind of device in its lower half and the
/// access in its upper half.
const ACCESS_TYPE: i16 = 0;
const MAJOR: i16 = 4;
const MINOR: i16 = 8;
const BPF_DEVCG_DEV_CHAR: i32 = 2;
const BPF_DEVCG_ACC_MKNOD: i32 = 1;

/// Bits of a minor number (`MINORBITS`).
const MINOR_BITS: i32 = 20;

/// Operations of instructions, each a class, a size or operation, and a source.
const LOAD_WORD: u8 = 0x61;
const AND: u8 = 0x57;
const OR_REGISTER: u8 = 0x4f;
const SHIFT_LEFT: u8 = 0x67;
const SHIFT_RIGHT: u8 = 0x77;
const MOVE: u8 = 0xb7;
const MOVE_REGISTER: u8 = 0xbf;
const JUMP_IF_EQUAL: u8 = 0x15;
const JUMP_UNLESS_EQUAL: u8 = 0x55;
const EXIT: u8 = 0x95;

/// `struct bpf_insn`.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
struct Instruction {
    operation: u8,
    /// The destination in the lower half, the source in the upper one.
    registers: u8,
    offset: i16,
    immediate: i32,
}

fn instruction(operation: u8, to: u8, from: u8, offset: i16, immediate: i32) -> Instruction {
    Instruction {
        operation,
        registers: from << 4 | to,
        offset,
        immediate,
    }
}

/// Returns a program that denies everything but to open devices of `allowed`, which are character
/// devices.
fn program(allowed: &[(u32, u32)]) -> Vec<Instruction> {
    // r1 is the context, r0 the result: 1 allows.
    let mut program = vec![
        instruction(LOAD_WORD, 2, 1, ACCESS_TYPE, 0),
        instruction(LOAD_WORD, 3, 1, MAJOR, 0),
        instruction(LOAD_WORD, 4, 1, MINOR, 0),
        instruction(MOVE_REGISTER, 5, 2, 0, 0),
        instruction(AND, 5, 0, 0, 0xffff),
        instruction(SHIFT_RIGHT, 2, 0, 0, 16),
        instruction(AND, 2, 0, 0, BPF_DEVCG_ACC_MKNOD),
        instruction(SHIFT_LEFT, 3, 0, 0, MINOR_BITS),
        instruction(OR_REGISTER, 3, 4, 0, 0),
        instruction(MOVE, 0, 0, 0, 0),
    ];
    // Jumps are relative to the next instruction; those that allow go to the last two.
    let rest = |before: usize| i16::try_from(allowed.len() - before).unwrap_or(i16::MAX);
    let deny = rest(0);
    program.extend([
        instruction(JUMP_UNLESS_EQUAL, 5, 0, deny + 1, BPF_DEVCG_DEV_CHAR),
        instruction(JUMP_UNLESS_EQUAL, 2, 0, deny, 0),
    ]);
    for (number, (major, minor)) in allowed.iter().enumerate() {
        let device = (major << MINOR_BITS | minor).cast_signed();
        let allow = rest(number);
        program.push(instruction(JUMP_IF_EQUAL, 3, 0, allow, device));
    }
    program.extend([
        instruction(EXIT, 0, 0, 0, 0),
        instruction(MOVE, 0, 0, 0, 1),
        instruction(EXIT, 0, 0, 0, 0),
    ]);
    program
}

/// The beginning of `union bpf_attr` for a program to be loaded.
#[derive(Debug, Default)]
#[repr(C)]
struct Load {
    kind: u32,
    instructions: u32,
    program: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
}

/// The beginning of `union bpf_attr` for a program to be attached.
#[derive(Debug)]
#[repr(C)]
struct Attach {
    target: u32,
    program: u32,
    kind: u32,
    flags: u32,
}

/// Calls `bpf(2)` with the beginning of its attributes: the rest is zero for the kernel.
///
/// # Safety
/// Addresses in `attributes` are those of memory that lives until this returns.
unsafe fn bpf<T>(command: libc::c_long, attributes: &T) -> io::Result<libc::c_long> {
    // SAFETY: the kernel reads as many bytes of the attributes as it is told, and writes nothing.
    let result = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            std::ptr::from_ref(attributes),
            size_of::<T>(),
        )
    };
    match result {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

fn load() -> io::Result<OwnedFd> {
    let program = program(&ALLOWED);
    let attributes = Load {
        kind: BPF_PROG_TYPE_CGROUP_DEVICE,
        instructions: u32::try_from(program.len()).unwrap_or(u32::MAX),
        program: program.as_ptr() as u64,
        license: c"Apache-2.0".as_ptr() as u64,
        ..Load::default()
    };
    // SAFETY: the program and the license live until the call returns.
    let loaded = unsafe { bpf(BPF_PROG_LOAD, &attributes) }?;
    let fd = i32::try_from(loaded).map_err(io::Error::other)?;
    // SAFETY: the kernel has made the descriptor for this call, and sets close-on-exec.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Lets the processes of the group at `path` open no device but those that a machine needs, and
/// make none. The program goes with the group.
///
/// # Errors
/// The kernel's: it has no such programs (`CONFIG_CGROUP_BPF`), this process may not load one
/// (CAP_SYS_ADMIN, or CAP_BPF and CAP_NET_ADMIN), or a group above has a program of its own that
/// admits no others.
pub(super) fn deny_devices(path: &Path) -> io::Result<()> {
    let program = load()?;
    let group = File::open(path)?;
    let number = |fd: i32| u32::try_from(fd).map_err(io::Error::other);
    let attributes = Attach {
        target: number(group.as_raw_fd())?,
        program: number(program.as_raw_fd())?,
        kind: BPF_CGROUP_DEVICE,
        flags: BPF_F_ALLOW_MULTI,
    };
    // SAFETY: there are no addresses in these attributes.
    unsafe { bpf(BPF_PROG_ATTACH, &attributes) }?;
    Ok(())
}

/// Tries whether this process may load such a program.
///
/// # Errors
/// As for a sandbox's group.
pub fn try_device_group() -> io::Result<()> {
    load().map(drop)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::process::Command;

    use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
    use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

    use super::*;

    /// Control groups, wherever this host has them.
    struct Groups(tempfile::TempDir);

    impl Groups {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            mount("none", dir.path(), "cgroup2", MountFlags::empty(), None).unwrap();
            Self(dir)
        }
    }

    impl Drop for Groups {
        fn drop(&mut self) {
            let _ = unmount(self.0.path(), UnmountFlags::DETACH);
        }
    }

    /// Needs root, and a kernel with `CONFIG_CGROUP_BPF`.
    #[test]
    fn a_device_node_in_a_shared_directory_is_not_opened_whatever_its_mount_allows() {
        try_device_group().unwrap();
        let groups = Groups::new();
        let group = groups
            .0
            .path()
            .join(format!("podvisor-devices-{}", std::process::id()));
        fs::create_dir(&group).unwrap();
        deny_devices(&group).unwrap();
        let shared = tempfile::tempdir().unwrap();
        mount("none", shared.path(), "tmpfs", MountFlags::empty(), None).unwrap();
        let node = |name: &str, kind, device| {
            let path = shared.path().join(name);
            mknodat(CWD, &path, kind, Mode::RUSR | Mode::WUSR, device).unwrap();
        };
        node("null", FileType::CharacterDevice, makedev(1, 3));
        node("zero", FileType::CharacterDevice, makedev(1, 5));
        // A block device of the numbers that `null` has as a character device.
        node("disk", FileType::BlockDevice, makedev(1, 3));
        fs::write(shared.path().join("file"), "x").unwrap();
        let attempts = "for way in '<' '>'; do for name in null zero disk file; do \
            (eval \": $way $name\") 2>/dev/null && echo $way$name; done; done; \
            mknod made c 1 3 2>/dev/null && echo made; true";
        let attempt = |enter: &str| {
            let mut shell = Command::new("sh");
            shell.args(["-c", &format!("{enter}; {attempts}"), "sh"]);
            shell.arg(&group).current_dir(shared.path());
            let output = shell.output().unwrap();
            assert!(output.status.success(), "{output:?}");
            String::from_utf8(output.stdout).unwrap()
        };
        let inside = attempt("echo $$ > $1/cgroup.procs");
        let outside = attempt("true");
        unmount(shared.path(), UnmountFlags::DETACH).unwrap();
        fs::remove_dir(&group).unwrap();
        assert_eq!(inside, "<null\n<file\n>null\n>file\n");
        assert!(outside.contains("<zero") && outside.ends_with("made\n"));
    }
}

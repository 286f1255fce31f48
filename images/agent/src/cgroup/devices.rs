//! The devices that a container may use: the specification's rules as a BPF program.
//!
//! In cgroup v2 the kernel runs a program of type `BPF_PROG_TYPE_CGROUP_DEVICE` for each open and
//! mknod of a device. It is built here from `linux.resources.devices`, in which the last matching
//! rule decides, separately for reading, writing and mknod. The devices that every container has
//! come after those rules; everything that no rule names is denied.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::OnceLock;

use oci_spec::runtime::{Linux, LinuxDeviceCgroup, LinuxDeviceType};
use rustix::fs::{Mode, OFlags, open};

use crate::sys::DeviceInstruction as Instruction;

/// A group without processes, next to those of containers: no program above them applies to them.
const NOBODYS: &str = "/sys/fs/cgroup/podvisor-devices";

/// Maximum number of rules in a specification; a pod's has a few dozen.
const MAX_RULES: usize = 1024;

/// Maximum number of attempts to load a program while signals interrupt its verification.
const LOAD_ATTEMPTS: u32 = 100;

/// `BPF_DEVCG_ACC_*`
const MKNOD: i32 = 1;
const READ: i32 = 2;
const WRITE: i32 = 4;
const ALL: i32 = MKNOD | READ | WRITE;
/// `BPF_DEVCG_DEV_*`
const BLOCK: i32 = 1;
const CHAR: i32 = 2;

/// A container's devices cannot be restricted as specified.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// A rule is invalid.
    #[error("device rule {index}: {problem}")]
    Rule {
        /// Its index in `linux.resources.devices`.
        index: usize,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// More rules than the limit.
    #[error("more than {MAX_RULES} devices and device rules")]
    TooMany,
    /// The kernel does not accept the program.
    #[error(
        "cannot restrict devices: the guest's kernel, which needs CONFIG_CGROUP_BPF, \
         does not take the program"
    )]
    Kernel(#[source] io::Error),
}

/// One rule; `None` matches everything.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Rule {
    allow: bool,
    access: i32,
    kind: Option<i32>,
    major: Option<i32>,
    minor: Option<i32>,
}

const fn char_device(major: i32, minor: Option<i32>) -> Rule {
    Rule {
        allow: true,
        access: ALL,
        kind: Some(CHAR),
        major: Some(major),
        minor,
    }
}

const fn mknod(kind: i32) -> Rule {
    Rule {
        allow: true,
        access: MKNOD,
        kind: Some(kind),
        major: None,
        minor: None,
    }
}

/// The devices that every container has (OCI runtime specification, "Default Devices"), and mknod
/// of anything, since a node without permission to open it is useless.
const DEFAULTS: [Rule; 11] = [
    mknod(CHAR),
    mknod(BLOCK),
    char_device(1, Some(3)), // null
    char_device(1, Some(5)), // zero
    char_device(1, Some(7)), // full
    char_device(1, Some(8)), // random
    char_device(1, Some(9)), // urandom
    char_device(5, Some(0)), // tty
    char_device(5, Some(1)), // console
    char_device(5, Some(2)), // ptmx
    char_device(136, None),  // pts
];

/// A checked set of rules.
#[derive(Debug, Clone)]
pub struct DeviceFilter {
    rules: Vec<Rule>,
}

impl DeviceFilter {
    /// Reads the rules of a specification.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Rule`] and [`DeviceError::TooMany`].
    pub fn new(linux: &Linux) -> Result<Self, DeviceError> {
        let wanted = linux
            .resources()
            .as_ref()
            .and_then(|r| r.devices().as_deref());
        let made = linux.devices().as_deref().unwrap_or_default();
        let wanted = wanted.unwrap_or_default();
        if wanted.len().saturating_add(made.len()) > MAX_RULES {
            return Err(DeviceError::TooMany);
        }
        let mut rules = Vec::new();
        for (index, rule) in wanted.iter().enumerate() {
            let rule = Rule::try_from(rule);
            rules.push(rule.map_err(|problem| DeviceError::Rule { index, problem })?);
        }
        // Devices that the specification creates may also be used.
        for (index, device) in made.iter().enumerate() {
            let problem = |problem| DeviceError::Rule { index, problem };
            rules.push(Rule {
                allow: true,
                access: ALL,
                kind: kind(device.typ()),
                major: number(Some(device.major())).map_err(problem)?,
                minor: number(Some(device.minor())).map_err(problem)?,
            });
        }
        rules.extend(DEFAULTS);
        Ok(Self { rules })
    }

    /// Applies the rules to the control group in this directory and all below it.
    ///
    /// # Errors
    ///
    /// [`DeviceError::Kernel`].
    pub fn attach(&self, cgroup: &Path) -> Result<(), DeviceError> {
        static KEPT: OnceLock<()> = OnceLock::new();
        KEPT.get_or_init(|| {
            if let Err(error) = keep_filter_attached() {
                tracing::debug!(%error, "failed to keep device filters attached");
            }
        });
        attach_to(cgroup, &self.program()).map_err(DeviceError::Kernel)
    }

    /// Builds the program: register 3 has the accesses that are still to be decided; each rule,
    /// from the last to the first, either denies or removes those that it allows.
    fn program(&self) -> Vec<Instruction> {
        use Instruction as I;
        let mut program = vec![
            // struct bpf_cgroup_dev_ctx { u32 access_type; u32 major; u32 minor; }
            I::load(KIND, 0),
            I::copy(PENDING, KIND),
            I::and(KIND, 0xffff),
            I::shift_right(PENDING, 16),
            I::load(MAJOR, 4),
            I::load(MINOR, 8),
        ];
        for rule in self.rules.iter().rev() {
            let decision = if rule.allow {
                vec![
                    I::and(PENDING, !rule.access & ALL),
                    I::skip_unless_equal(PENDING, 0, 2),
                    I::set(RESULT, 1),
                    I::exit(),
                ]
            } else {
                vec![
                    I::copy(SCRATCH, PENDING),
                    I::and(SCRATCH, rule.access),
                    I::skip_if_equal(SCRATCH, 0, 2),
                    I::set(RESULT, 0),
                    I::exit(),
                ]
            };
            let conditions: Vec<(u8, i32)> =
                [(KIND, rule.kind), (MAJOR, rule.major), (MINOR, rule.minor)]
                    .into_iter()
                    .filter_map(|(register, value)| Some((register, value?)))
                    .collect();
            // Number of remaining instructions of this rule, to be skipped if a condition fails; at
            // most seven.
            let mut rest = conditions.len().saturating_add(decision.len());
            for (register, value) in conditions {
                rest = rest.saturating_sub(1);
                let distance = i16::try_from(rest).unwrap_or(i16::MAX);
                program.push(I::skip_unless_equal(register, value, distance));
            }
            program.extend(decision);
        }
        program.extend([I::set(RESULT, 0), I::exit()]);
        program
    }
}

fn attach_to(cgroup: &Path, program: &[Instruction]) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory: OwnedFd = open(cgroup, flags, Mode::empty())?;
    let program = undisturbed(|| crate::sys::load_device_program(program))?;
    crate::sys::attach_device_program(&directory, &program)
}

/// Loads a program again whenever a signal interrupted the kernel's verification, which then fails
/// with `EAGAIN`. Exits of containers cause signals; there may be many in a short time, but not
/// indefinitely.
fn undisturbed<T>(mut load: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let mut left = LOAD_ATTEMPTS;
    loop {
        match load() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && left > 0 => left -= 1,
            loaded => return loaded,
        }
    }
}

/// Attaches a program to a group that never has processes, so that at least one is attached from
/// now on. The kernel enables device programs by a static key: it patches its own code when the
/// first one is attached and when the last one is removed. A clone would do that for its first
/// container, in pages of the kernel that it shares with its template until then.
fn keep_filter_attached() -> io::Result<()> {
    match fs::create_dir(NOBODYS) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
        _ => {}
    }
    let all = [Instruction::set(RESULT, 1), Instruction::exit()];
    attach_to(Path::new(NOBODYS), &all)
}

impl TryFrom<&LinuxDeviceCgroup> for Rule {
    type Error = &'static str;

    fn try_from(rule: &LinuxDeviceCgroup) -> Result<Self, &'static str> {
        let mut access = 0;
        for letter in rule.access().as_deref().unwrap_or_default().chars() {
            access |= match letter {
                'r' => READ,
                'w' => WRITE,
                'm' => MKNOD,
                _ => return Err("`access` is made of r, w and m"),
            };
        }
        Ok(Self {
            allow: rule.allow(),
            // No access given means full access, as in other runtimes.
            access: if access == 0 { ALL } else { access },
            kind: kind(rule.typ().unwrap_or_default()),
            major: number(rule.major())?,
            minor: number(rule.minor())?,
        })
    }
}

fn kind(kind: LinuxDeviceType) -> Option<i32> {
    match kind {
        LinuxDeviceType::A => None,
        LinuxDeviceType::B => Some(BLOCK),
        LinuxDeviceType::C | LinuxDeviceType::U => Some(CHAR),
        // Not a device: the kernel never checks it, and its value matches nothing.
        LinuxDeviceType::P => Some(0),
    }
}

/// Converts a device number; -1 stands for all, as in the specifications of container engines.
fn number(number: Option<i64>) -> Result<Option<i32>, &'static str> {
    match number {
        None | Some(-1) => Ok(None),
        Some(number) => match i32::try_from(number) {
            Ok(number @ 0..) => Ok(Some(number)),
            _ => Err("a device number is 0 to 2147483647"),
        },
    }
}

const RESULT: u8 = 0;
const CONTEXT: u8 = 1;
const KIND: u8 = 2;
const PENDING: u8 = 3;
const MAJOR: u8 = 4;
const MINOR: u8 = 5;
const SCRATCH: u8 = 6;

impl Instruction {
    const LOAD_WORD: u8 = 0x61;
    const COPY: u8 = 0xbf;
    const SET: u8 = 0xb7;
    const AND: u8 = 0x57;
    const SHIFT_RIGHT: u8 = 0x77;
    const JUMP_EQUAL: u8 = 0x15;
    const JUMP_NOT_EQUAL: u8 = 0x55;
    const EXIT: u8 = 0x95;

    fn new(code: u8, register: u8, immediate: i32) -> Self {
        Self {
            code,
            registers: register,
            offset: 0,
            immediate,
        }
    }

    fn load(register: u8, offset: i16) -> Self {
        Self {
            code: Self::LOAD_WORD,
            registers: register | CONTEXT << 4,
            offset,
            immediate: 0,
        }
    }

    fn copy(to: u8, from: u8) -> Self {
        Self::new(Self::COPY, to | from << 4, 0)
    }

    fn set(register: u8, value: i32) -> Self {
        Self::new(Self::SET, register, value)
    }

    fn and(register: u8, mask: i32) -> Self {
        Self::new(Self::AND, register, mask)
    }

    fn shift_right(register: u8, bits: i32) -> Self {
        Self::new(Self::SHIFT_RIGHT, register, bits)
    }

    fn skip_if_equal(register: u8, value: i32, offset: i16) -> Self {
        Self {
            offset,
            ..Self::new(Self::JUMP_EQUAL, register, value)
        }
    }

    fn skip_unless_equal(register: u8, value: i32, offset: i16) -> Self {
        Self {
            offset,
            ..Self::new(Self::JUMP_NOT_EQUAL, register, value)
        }
    }

    fn exit() -> Self {
        Self::new(Self::EXIT, 0, 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    /// Runs a program as the kernel does, and returns its result.
    fn run(program: &[Instruction], kind: i32, access: i32, major: i32, minor: i32) -> bool {
        let context = [access << 16 | kind, major, minor];
        let mut registers = [0i64; 11];
        let mut at = 0;
        for _ in 0..=program.len() {
            let i = program[at];
            let (to, from) = (usize::from(i.registers & 15), usize::from(i.registers >> 4));
            let immediate = i64::from(i.immediate);
            at += 1;
            let jumps = match i.code {
                Instruction::LOAD_WORD => {
                    registers[to] = i64::from(context[usize::try_from(i.offset).unwrap() / 4]);
                    false
                }
                Instruction::COPY => {
                    registers[to] = registers[from];
                    false
                }
                Instruction::SET => {
                    registers[to] = immediate;
                    false
                }
                Instruction::AND => {
                    registers[to] &= immediate;
                    false
                }
                Instruction::SHIFT_RIGHT => {
                    registers[to] >>= immediate;
                    false
                }
                Instruction::JUMP_EQUAL => registers[to] == immediate,
                Instruction::JUMP_NOT_EQUAL => registers[to] != immediate,
                Instruction::EXIT => return registers[0] == 1,
                other => panic!("unknown instruction {other:#x}"),
            };
            if jumps {
                at += usize::try_from(i.offset).unwrap();
            }
        }
        panic!("the program does not end");
    }

    fn filter(rules: Value, devices: Value) -> Result<DeviceFilter, DeviceError> {
        let linux = json!({"resources": {"devices": rules}, "devices": devices});
        DeviceFilter::new(&serde_json::from_value(linux).unwrap())
    }

    #[test]
    fn without_rules_there_are_the_default_devices_alone() {
        let program = filter(json!([]), json!([])).unwrap().program();
        assert!(run(&program, CHAR, READ | WRITE, 1, 3));
        assert!(run(&program, CHAR, READ | WRITE, 136, 77));
        assert!(run(&program, BLOCK, MKNOD, 254, 0));
        // A disk, and the I/O ports with which a guest is powered off.
        assert!(!run(&program, BLOCK, READ, 254, 0));
        assert!(!run(&program, CHAR, WRITE, 1, 4));
        assert!(!run(&program, BLOCK, READ, 1, 3));
    }

    #[test]
    fn the_last_rule_that_matches_decides_for_each_access() {
        let rules = json!([
            {"allow": false, "access": "rwm"},
            {"allow": true, "type": "c", "major": 10, "minor": 200, "access": "rwm"},
            {"allow": true, "type": "b", "major": 7, "access": "r"},
            {"allow": true, "type": "b", "major": 7, "minor": 1, "access": "w"},
            {"allow": false, "type": "c", "major": 10, "minor": 200, "access": "w"},
        ]);
        let program = filter(rules, json!([])).unwrap().program();
        assert!(run(&program, CHAR, READ, 10, 200));
        assert!(!run(&program, CHAR, WRITE, 10, 200));
        assert!(!run(&program, CHAR, READ | WRITE, 10, 200));
        assert!(run(&program, BLOCK, READ | WRITE, 7, 1));
        assert!(!run(&program, BLOCK, READ | WRITE, 7, 2));
        assert!(run(&program, BLOCK, READ, 7, 2));
    }

    #[test]
    fn a_privileged_container_may_use_everything() {
        let rules = json!([{"allow": true, "access": "rwm"}]);
        let program = filter(rules, json!([])).unwrap().program();
        assert!(run(&program, BLOCK, ALL, 254, 0));
        assert!(run(&program, CHAR, ALL, 1, 4));
    }

    #[test]
    fn devices_that_the_specification_makes_can_be_used() {
        let devices = json!([{"path": "/dev/fuse", "type": "c", "major": 10, "minor": 229}]);
        let rules = json!([{"allow": false, "access": "rwm"}]);
        let program = filter(rules, devices).unwrap().program();
        assert!(run(&program, CHAR, READ | WRITE, 10, 229));
        assert!(!run(&program, CHAR, READ, 10, 228));
    }

    #[test]
    fn rules_that_make_no_sense_are_refused() {
        for rule in [
            json!([{"allow": true, "access": "x"}]),
            json!([{"allow": true, "access": "r", "major": -2}]),
            json!([{"allow": true, "access": "r", "minor": 1i64 << 40}]),
        ] {
            assert!(matches!(
                filter(rule, json!([])),
                Err(DeviceError::Rule { index: 0, .. })
            ));
        }
        let many = vec![json!({"allow": true, "access": "r"}); MAX_RULES + 1];
        assert!(matches!(
            filter(json!(many), json!([])),
            Err(DeviceError::TooMany)
        ));
    }

    #[test]
    fn a_program_whose_check_a_signal_stopped_is_loaded_again() {
        let disturbed = || io::Error::from_raw_os_error(libc::EAGAIN);
        let mut loads = 0;
        let loaded = undisturbed(|| {
            loads += 1;
            match loads {
                4 => Ok("loaded"),
                _ => Err(disturbed()),
            }
        });
        assert_eq!(loaded.unwrap(), "loaded");
        let never = undisturbed(|| Err::<(), _>(disturbed()));
        assert_eq!(never.unwrap_err().raw_os_error(), Some(libc::EAGAIN));
        let refused = undisturbed(|| Err::<(), _>(io::Error::from_raw_os_error(libc::EINVAL)));
        assert_eq!(refused.unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }

    #[test]
    fn instructions_are_laid_out_as_the_kernel_reads_them() {
        assert_eq!(size_of::<Instruction>(), 8);
    }

    prop_compose! {
        fn any_rule()(
            allow: bool,
            access in 1..=ALL,
            kind in proptest::option::of(1..=2),
            major in proptest::option::of(0..3),
            minor in proptest::option::of(0..3),
        ) -> Rule {
            Rule { allow, access, kind, major, minor }
        }
    }

    proptest! {
        #[test]
        fn the_program_answers_as_the_rules_read(
            rules in proptest::collection::vec(any_rule(), 0..12),
            kind in 1..=2,
            access in 1..=ALL,
            major in 0..3,
            minor in 0..3,
        ) {
            let matches = |rule: &&Rule, bit| {
                rule.access & bit != 0
                    && rule.kind.is_none_or(|k| k == kind)
                    && rule.major.is_none_or(|m| m == major)
                    && rule.minor.is_none_or(|m| m == minor)
            };
            let expected = [MKNOD, READ, WRITE].into_iter().filter(|bit| access & bit != 0).all(
                |bit| rules.iter().rev().find(|rule| matches(rule, bit)).is_some_and(|r| r.allow),
            );
            let program = DeviceFilter { rules }.program();
            prop_assert_eq!(run(&program, kind, access, major, minor), expected);
        }
    }
}

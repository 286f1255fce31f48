//! Runs filters here, and compares them with libseccomp's for the same profile.

use std::io::{Read as _, Seek as _};

use libseccomp::{
    ScmpAction, ScmpArch, ScmpArgCompare, ScmpCompareOp, ScmpFilterContext, ScmpSyscall,
};
use oci_spec::runtime::LinuxSeccompOperator;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

use super::program::{
    ALU_AND_K, JMP_JA, JMP_JEQ_K, JMP_JGE_K, JMP_JGT_K, KILL_THREAD, LD_W_ABS, RET_K,
};
use super::*;
use crate::sys::FilterInstruction as Instruction;

const X86_64: u32 = 0xc000_003e;
const X86: u32 = 0x4000_0003;
const AARCH64: u32 = 0xc000_00b7;

/// `struct seccomp_data`.
#[derive(Debug, Clone, Copy)]
struct Call {
    number: u32,
    architecture: u32,
    arguments: [u64; 6],
}

impl Call {
    fn word(&self, offset: u32) -> u32 {
        let argument = |at: u32| self.arguments[(at - 16) as usize / 8];
        match offset {
            0 => self.number,
            4 => self.architecture,
            16.. if offset.is_multiple_of(8) => argument(offset) as u32,
            16.. if offset.is_multiple_of(4) => (argument(offset) >> 32) as u32,
            _ => panic!("the filter reads at {offset}"),
        }
    }
}

/// Returns the result of a filter.
fn run(filter: &[Instruction], call: &Call) -> u32 {
    let (mut at, mut accumulator) = (0, 0);
    loop {
        let Instruction { code, jt, jf, k } = filter[at];
        at += 1;
        let mut jump = |holds| at += usize::from(if holds { jt } else { jf });
        match code {
            LD_W_ABS => accumulator = call.word(k),
            ALU_AND_K => accumulator &= k,
            JMP_JA => at += k as usize,
            JMP_JEQ_K => jump(accumulator == k),
            JMP_JGT_K => jump(accumulator > k),
            JMP_JGE_K => jump(accumulator >= k),
            RET_K => return k,
            // libseccomp uses neither a test of bits nor a return of the accumulator.
            _ => panic!("unknown instruction {code:#x}"),
        }
    }
}

fn profile(value: &Value) -> LinuxSeccomp {
    serde_json::from_value(value.clone()).unwrap()
}

fn compiled(value: &Value) -> Vec<Instruction> {
    compile(&profile(value)).unwrap().instructions
}

fn scmp_action(action: LinuxSeccompAction, errno: Option<u32>) -> ScmpAction {
    match action {
        LinuxSeccompAction::ScmpActAllow => ScmpAction::Allow,
        LinuxSeccompAction::ScmpActErrno => ScmpAction::Errno(errno.unwrap_or(EPERM).cast_signed()),
        LinuxSeccompAction::ScmpActLog => ScmpAction::Log,
        LinuxSeccompAction::ScmpActKillProcess => ScmpAction::KillProcess,
        LinuxSeccompAction::ScmpActTrap => ScmpAction::Trap,
        _ => panic!("not generated"),
    }
}

fn scmp_compare(arg: &LinuxSeccompArg) -> ScmpArgCompare {
    let operator = match arg.op() {
        LinuxSeccompOperator::ScmpCmpEq => ScmpCompareOp::Equal,
        LinuxSeccompOperator::ScmpCmpNe => ScmpCompareOp::NotEqual,
        LinuxSeccompOperator::ScmpCmpLt => ScmpCompareOp::Less,
        LinuxSeccompOperator::ScmpCmpLe => ScmpCompareOp::LessOrEqual,
        LinuxSeccompOperator::ScmpCmpGt => ScmpCompareOp::Greater,
        LinuxSeccompOperator::ScmpCmpGe => ScmpCompareOp::GreaterEqual,
        LinuxSeccompOperator::ScmpCmpMaskedEq => ScmpCompareOp::MaskedEqual(arg.value()),
    };
    let datum = match arg.op() {
        LinuxSeccompOperator::ScmpCmpMaskedEq => arg.value_two().unwrap_or(0),
        _ => arg.value(),
    };
    ScmpArgCompare::new(arg.index().try_into().unwrap(), operator, datum)
}

/// Returns the filter that libseccomp generates for a profile, called as runc does.
fn reference(profile: &LinuxSeccomp) -> Vec<Instruction> {
    let default = scmp_action(profile.default_action(), profile.default_errno_ret());
    let mut context = ScmpFilterContext::new(default).unwrap();
    if profile
        .architectures()
        .iter()
        .flatten()
        .any(|arch| *arch == Arch::ScmpArchX86)
    {
        context.add_arch(ScmpArch::X86).unwrap();
    }
    for rule in profile.syscalls().iter().flatten() {
        let action = scmp_action(rule.action(), rule.errno_ret());
        if action == default {
            continue;
        }
        for name in rule.names() {
            let Ok(call) = ScmpSyscall::from_name(name) else {
                continue;
            };
            let compares: Vec<_> = rule.args().iter().flatten().map(scmp_compare).collect();
            if compares.is_empty() {
                context.add_rule(action, call).unwrap();
            } else {
                context
                    .add_rule_conditional(action, call, &compares)
                    .unwrap();
            }
        }
    }
    let mut file = tempfile::tempfile().unwrap();
    context.export_bpf(&file).unwrap();
    file.rewind().unwrap();
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    let (instructions, rest) = bytes.as_chunks::<8>();
    assert!(rest.is_empty());
    instructions
        .iter()
        .map(|&[c0, c1, jt, jf, k0, k1, k2, k3]| Instruction {
            code: u16::from_ne_bytes([c0, c1]),
            jt,
            jf,
            k: u32::from_ne_bytes([k0, k1, k2, k3]),
        })
        .collect()
}

/// Returns the highest number that libseccomp has for a name in the profile. runc adds to
/// libseccomp's filter that numbers above it fail with ENOSYS.
fn last_named(profile: &LinuxSeccomp, architecture: ScmpArch) -> Option<u32> {
    let number = |name: &String| {
        // libseccomp has a negative number for these, although their own ones are in its filters.
        if architecture == ScmpArch::X86 && Architecture::X86.multiplexed(name).is_some() {
            return Architecture::X86.number(name);
        }
        let call = ScmpSyscall::from_name_by_arch(name, architecture).ok()?;
        // Calls that the architecture does not have get negative numbers.
        u32::try_from(i32::from(call)).ok()
    };
    let rules = profile.syscalls().iter().flatten();
    rules.flat_map(|rule| rule.names()).filter_map(number).max()
}

/// Arguments at and around the values in the conditions of the profile.
fn interesting(profile: &LinuxSeccomp) -> Vec<u64> {
    let mut values = vec![0, 1, u64::MAX, 1 << 32];
    for arg in profile
        .syscalls()
        .iter()
        .flatten()
        .flat_map(|rule| rule.args().iter().flatten())
    {
        for value in [arg.value(), arg.value_two().unwrap_or(0)] {
            values.extend([
                value,
                value.wrapping_add(1),
                value.wrapping_sub(1),
                value ^ (1 << 32),
                value ^ (1 << 63),
                !value,
            ]);
        }
    }
    values.sort_unstable();
    values.dedup();
    values
}

fn assert_same(profile: &LinuxSeccomp) {
    let (ours, theirs) = (compile(profile).unwrap().instructions, reference(profile));
    let values = interesting(profile);
    let has_x86 = (profile.architectures().iter().flatten()).any(|&a| a == Arch::ScmpArchX86);
    let is_newer = |call: &Call| {
        let last = match call.architecture {
            X86_64 if call.number < 0x4000_0000 => last_named(profile, ScmpArch::X8664),
            X86 if has_x86 => last_named(profile, ScmpArch::X86),
            _ => None,
        };
        !matches!(
            profile.default_action(),
            LinuxSeccompAction::ScmpActAllow | LinuxSeccompAction::ScmpActLog
        ) && last.is_some_and(|last| call.number > last)
    };
    for architecture in [X86_64, X86, AARCH64] {
        // The arguments of 32-bit programs have 32 bits.
        let width = if architecture == X86 {
            u64::from(u32::MAX)
        } else {
            u64::MAX
        };
        for number in (0..520).chain([0x3fff_ffff, 0x4000_0000, 0x4000_0001, u32::MAX - 1]) {
            for (i, &value) in values.iter().enumerate() {
                let other = values[(i * 7 + number as usize) % values.len()];
                let call = Call {
                    number,
                    architecture,
                    arguments: [value, other, value, other, value, other].map(|v| v & width),
                };
                let expected = if is_newer(&call) {
                    program::errno(ENOSYS)
                } else {
                    run(&theirs, &call)
                };
                assert_eq!(run(&ours, &call), expected, "{call:x?}");
            }
        }
    }
}

fn returned(value: &Value, architecture: u32, number: i64, arguments: [u64; 6]) -> u32 {
    run(
        &compiled(value),
        &Call {
            number: u32::try_from(number).unwrap(),
            architecture,
            arguments,
        },
    )
}

const NAMES: [&str; 24] = [
    "read",
    "write",
    "open",
    "openat",
    "close",
    "clone",
    "clone3",
    "socket",
    "bind",
    "accept",
    "recvmsg",
    "socketpair",
    "shmget",
    "semtimedop",
    "msgctl",
    "ioctl",
    "prctl",
    "umount",
    "umount2",
    "mmap2",
    "statx",
    "no_such_call",
    "futex_waitv",
    "personality",
];

fn any_condition() -> impl Strategy<Value = Value> {
    let value = prop_oneof![any::<u64>(), 0..4u64, Just(1 << 32), Just(u64::MAX)];
    let operator = select(vec!["EQ", "NE", "LT", "LE", "GT", "GE", "MASKED_EQ"]);
    (operator, value.clone(), value).prop_map(|(operator, value, value_two)| {
        json!({"value": value, "valueTwo": value_two, "op": format!("SCMP_CMP_{operator}")})
    })
}

/// At most one rule for each name: if conditions of several rules hold, our own precedence applies.
fn any_profile() -> impl Strategy<Value = Value> {
    let action = || {
        select(vec![
            json!({"action": "SCMP_ACT_ALLOW"}),
            json!({"action": "SCMP_ACT_ERRNO", "errnoRet": 38}),
            json!({"action": "SCMP_ACT_LOG"}),
            json!({"action": "SCMP_ACT_TRAP"}),
            json!({"action": "SCMP_ACT_KILL_PROCESS"}),
        ])
    };
    let conditions = prop::collection::vec(any_condition(), 0..3).prop_map(|mut conditions| {
        for (index, condition) in conditions.iter_mut().enumerate() {
            condition["index"] = json!(index);
        }
        conditions
    });
    let rules = prop::collection::vec((action(), conditions), NAMES.len());
    let named = prop::collection::vec(any::<bool>(), NAMES.len());
    let kinds = (any::<bool>(), any::<bool>());
    (action(), rules, named, kinds).prop_map(|(default, rules, named, (x86, conditional))| {
        // Conditions on multiplexed calls are tested separately. If there are multiplexed calls,
        // x86 has no conditions at all: libseccomp 2.5.4 then compares the architecture with
        // numbers.
        let multiplexed = |name| Architecture::X86.multiplexed(name).is_some();
        let rules: Vec<Value> = (rules.into_iter().zip(NAMES).zip(named))
            .filter(|((_, name), named)| *named && !(x86 && conditional && multiplexed(name)))
            .map(|(((mut rule, conditions), name), _)| {
                rule["names"] = json!([name]);
                let conditional = if x86 { conditional } else { !multiplexed(name) };
                if conditional && !conditions.is_empty() {
                    rule["args"] = json!(conditions);
                }
                rule
            })
            .collect();
        json!({
            "defaultAction": default["action"],
            "defaultErrnoRet": default["errnoRet"],
            "architectures": if x86 { json!(["SCMP_ARCH_X86_64", "SCMP_ARCH_X86"]) } else { json!([]) },
            "syscalls": rules,
        })
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn filters_decide_as_libseccomps_do(value in any_profile()) {
        assert_same(&profile(&value));
    }

    #[test]
    fn a_stored_filter_is_the_same(value in any_profile()) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("seccomp");
        let filter = compile(&profile(&value)).unwrap();
        filter.store(&path).unwrap();
        prop_assert_eq!(Filter::load(&path).unwrap(), filter);
    }
}

/// As in a typical profile of a container: hundreds of calls, more than a conditional jump reaches.
#[test]
fn a_filter_of_all_calls_decides_as_libseccomps_does() {
    let names = x86_names();
    let every_other = |first| names.iter().skip(first).step_by(2).collect::<Vec<_>>();
    assert_same(&profile(&json!({
        "defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38,
        "architectures": ["SCMP_ARCH_X86"],
        "syscalls": [
            {"names": every_other(0), "action": "SCMP_ACT_ALLOW"},
            {"names": every_other(1), "action": "SCMP_ACT_ERRNO"},
        ],
    })));
}

/// The names that libseccomp knows too.
fn x86_names() -> Vec<String> {
    (0..450)
        .filter_map(|number| {
            let name = syscalls::x86_64::Sysno::new(number)?.name();
            ScmpSyscall::from_name(name).ok().map(|_| name.to_owned())
        })
        .collect()
}

#[test]
fn a_rule_without_conditions_wins_over_those_that_have_some() {
    let conditional = json!({"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [
        {"index": 0, "value": 1, "op": "SCMP_CMP_EQ"}]});
    let always = json!({"names": ["socket"], "action": "SCMP_ACT_LOG"});
    for rules in [json!([conditional, always]), json!([always, conditional])] {
        let value = json!({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": rules});
        assert_eq!(
            returned(&value, X86_64, libc::SYS_socket, [1; 6]),
            program::LOG
        );
    }
}

#[test]
fn of_several_conditions_that_hold_the_first_decides() {
    let rule = |action: &str| {
        json!({"names": ["socket"], "action": action, "args": [
            {"index": 0, "value": 0, "op": "SCMP_CMP_GE"}]})
    };
    let value = json!({
        "defaultAction": "SCMP_ACT_ERRNO",
        "syscalls": [rule("SCMP_ACT_TRAP"), rule("SCMP_ACT_ALLOW")],
    });
    assert_eq!(
        returned(&value, X86_64, libc::SYS_socket, [1; 6]),
        program::TRAP
    );
}

#[test]
fn conditions_on_one_argument_are_alternatives() {
    let equal = |value| json!({"index": 2, "value": value, "op": "SCMP_CMP_EQ"});
    let value = json!({"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [
        {"names": ["ioctl"], "action": "SCMP_ACT_ALLOW", "args": [equal(5), equal(7)]}]});
    for (argument, expected) in [
        (5, program::ALLOW),
        (6, program::errno(EPERM)),
        (7, program::ALLOW),
    ] {
        let arguments = [0, 0, argument, 0, 0, 0];
        assert_eq!(
            returned(&value, X86_64, libc::SYS_ioctl, arguments),
            expected
        );
    }
}

#[test]
fn calls_that_are_newer_than_the_profile_do_not_exist() {
    let with = |default: &str| {
        json!({"defaultAction": default, "architectures": ["SCMP_ARCH_X86", "SCMP_ARCH_X32"],
        "syscalls": [
            {"names": ["read", "openat", "no_such_call"], "action": "SCMP_ACT_ALLOW"},
            // The highest ones, with the default action.
            {"names": ["statx", "getrandom"], "action": default},
        ]})
    };
    let denied = program::errno(EPERM);
    let enosys = program::errno(ENOSYS);
    let errno = with("SCMP_ACT_ERRNO");
    for (number, expected) in [
        (libc::SYS_read, program::ALLOW),
        (libc::SYS_mount, denied),
        (libc::SYS_statx, denied),
        (libc::SYS_statx + 1, enosys),
        (libc::SYS_clone3, enosys),
        (0x3fff_ffff, enosys),
    ] {
        assert_eq!(returned(&errno, X86_64, number, [0; 6]), expected);
    }
    // statx of 32-bit programs, and the next number.
    assert_eq!(returned(&errno, X86, 383, [0; 6]), denied);
    assert_eq!(returned(&errno, X86, 384, [0; 6]), enosys);
    assert_eq!(returned(&errno, AARCH64, 1000, [0; 6]), KILL_THREAD);

    let newest = |value: &Value| returned(value, X86_64, libc::SYS_clone3, [0; 6]);
    for default in ["SCMP_ACT_KILL", "SCMP_ACT_KILL_PROCESS", "SCMP_ACT_TRAP"] {
        assert_eq!(newest(&with(default)), enosys, "{default}");
    }
    assert_eq!(newest(&with("SCMP_ACT_ALLOW")), program::ALLOW);
    assert_eq!(newest(&with("SCMP_ACT_LOG")), program::LOG);
    assert_eq!(newest(&with("SCMP_ACT_TRACE")), program::trace(EPERM));
    // A profile that names no call has no age.
    assert_eq!(newest(&json!({"defaultAction": "SCMP_ACT_ERRNO"})), denied);
}

#[test]
fn other_architectures_are_killed_unless_they_are_named() {
    let mut value = json!({"defaultAction": "SCMP_ACT_ALLOW"});
    assert_eq!(returned(&value, X86, 1, [0; 6]), KILL_THREAD);
    assert_eq!(returned(&value, X86_64, 0x4000_0001, [0; 6]), KILL_THREAD);
    value["architectures"] = json!(["SCMP_ARCH_X86", "SCMP_ARCH_X32"]);
    assert_eq!(returned(&value, X86, 1, [0; 6]), program::ALLOW);
    assert_eq!(
        returned(&value, X86_64, 0x4000_0001, [0; 6]),
        program::errno(ENOSYS)
    );
    assert_eq!(returned(&value, AARCH64, 1, [0; 6]), KILL_THREAD);
}

#[test]
fn architectures_that_the_guest_does_not_have_change_nothing() {
    let with = |named: Value| {
        compiled(
            &json!({"defaultAction": "SCMP_ACT_ERRNO", "architectures": named,
            "syscalls": [{"names": ["read"], "action": "SCMP_ACT_ALLOW"}]}),
        )
    };
    let several = json!(["SCMP_ARCH_AARCH64", "SCMP_ARCH_ARM", "SCMP_ARCH_X86"]);
    assert_eq!(with(several), with(json!(["SCMP_ARCH_X86"])));
}

#[test]
fn profiles_that_cannot_be_filters_are_refused() {
    let with = |rule: Value| json!({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [rule]});
    let error = |value: &Value| compile(&profile(value)).unwrap_err();
    assert!(matches!(
        error(&with(
            json!({"names": ["read"], "action": "SCMP_ACT_NOTIFY"})
        )),
        ProfileError::Notify
    ));
    assert!(matches!(
        error(&with(
            json!({"names": ["read"], "action": "SCMP_ACT_ERRNO", "errnoRet": 4096})
        )),
        ProfileError::Errno(4096)
    ));
    assert!(matches!(
        error(&with(
            json!({"names": ["read"], "action": "SCMP_ACT_LOG", "args": [
                {"index": 6, "value": 1, "op": "SCMP_CMP_EQ"}]})
        )),
        ProfileError::Argument(6)
    ));
    let many: Vec<Value> = (0..1000)
        .map(|i| json!({"index": 1, "value": i, "op": "SCMP_CMP_EQ"}))
        .collect();
    assert!(matches!(
        error(&with(
            json!({"names": ["read"], "action": "SCMP_ACT_LOG", "args": many})
        )),
        ProfileError::TooLarge(_)
    ));
}

#[test]
fn a_damaged_file_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("seccomp");
    for bytes in [&b""[..], b"abc", b"abcdefg"] {
        std::fs::write(&path, bytes).unwrap();
        assert!(Filter::load(&path).is_err());
    }
}

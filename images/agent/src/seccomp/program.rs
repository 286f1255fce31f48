//! Classic BPF for seccomp(2): instructions, and the assembly of filters.
//!
//! No instruction jumps backwards, and each piece ends in a return, so pieces are joined front to
//! back and a jump's distance is the length of what is in between.

use std::collections::BTreeMap;

use oci_spec::runtime::LinuxSeccompOperator as Operator;

use super::calls::Architecture;
use super::condition::Condition;
use crate::sys::FilterInstruction as Instruction;

// linux/bpf_common.h, linux/filter.h
pub(super) const LD_W_ABS: u16 = 0x20;
pub(super) const ALU_AND_K: u16 = 0x54;
pub(super) const JMP_JA: u16 = 0x05;
pub(super) const JMP_JEQ_K: u16 = 0x15;
pub(super) const JMP_JGT_K: u16 = 0x25;
pub(super) const JMP_JGE_K: u16 = 0x35;
pub(super) const RET_K: u16 = 0x06;

// linux/seccomp.h
pub(super) const KILL_PROCESS: u32 = 0x8000_0000;
pub(super) const KILL_THREAD: u32 = 0;
pub(super) const TRAP: u32 = 0x0003_0000;
pub(super) const LOG: u32 = 0x7ffc_0000;
pub(super) const ALLOW: u32 = 0x7fff_0000;

/// What a call that the kernel does not have fails with.
pub(super) const ENOSYS: u32 = libc::ENOSYS.cast_unsigned();

/// The call fails with `errno`.
pub(super) fn errno(errno: u32) -> u32 {
    0x0005_0000 | (errno & 0xffff)
}

/// A tracer is notified, with `data`.
pub(super) fn trace(data: u32) -> u32 {
    0x7ff0_0000 | (data & 0xffff)
}

// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

/// x32 numbers have this bit, under the architecture of x86_64.
const X32_BIT: u32 = 0x4000_0000;

/// Conditions that must all hold for an action.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) conditions: Vec<Condition>,
    pub(super) action: u32,
}

/// The decision for one system call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Leaf {
    Always(u32),
    /// The first rule that holds, or the default.
    Rules(Vec<Rule>),
}

/// The decisions for the calls of one architecture.
#[derive(Debug)]
pub(super) struct Table {
    pub(super) architecture: Architecture,
    /// By number; others get the default.
    pub(super) leaves: BTreeMap<u32, Leaf>,
    /// Numbers from this one on fail with ENOSYS. It is above those in `leaves`.
    pub(super) newer_from: Option<u32>,
}

fn statement(code: u16, k: u32) -> Instruction {
    Instruction {
        code,
        jt: 0,
        jf: 0,
        k,
    }
}

/// `code` compares with `k`; `otherwise`, for a comparison that does not hold, follows directly,
/// and `then`, for one that holds, follows it.
fn branch(
    code: u16,
    k: u32,
    otherwise: Vec<Instruction>,
    then: Vec<Instruction>,
) -> Vec<Instruction> {
    let mut joined = Vec::with_capacity(2 + then.len() + otherwise.len());
    match u8::try_from(otherwise.len()) {
        Ok(distance) => joined.push(Instruction {
            code,
            jt: distance,
            jf: 0,
            k,
        }),
        // A conditional jump reaches 255 instructions, an unconditional one all of them.
        Err(_) => {
            joined.push(Instruction {
                code,
                jt: 0,
                jf: 1,
                k,
            });
            joined.push(statement(
                JMP_JA,
                u32::try_from(otherwise.len()).unwrap_or(u32::MAX),
            ));
        }
    }
    joined.extend(otherwise);
    joined.extend(then);
    joined
}

/// Assembles the whole filter: calls of other architectures kill the thread, x32 calls get `x32`.
pub(super) fn assemble(tables: &[Table], default: u32, x32: u32) -> Vec<Instruction> {
    let mut rest = vec![statement(RET_K, KILL_THREAD)];
    for table in tables.iter().rev() {
        let architecture = table.architecture;
        let mut search = search(&ranges(table, default), default);
        if architecture == Architecture::X86_64 {
            search = branch(JMP_JGE_K, X32_BIT, search, vec![statement(RET_K, x32)]);
        }
        search.insert(0, statement(LD_W_ABS, NUMBER));
        rest = branch(JMP_JEQ_K, architecture.audit(), rest, search);
    }
    rest.insert(0, statement(LD_W_ABS, ARCHITECTURE));
    rest
}

/// The decision from a number on, up to the number of the next entry.
type Range = (u32, Vec<Instruction>);

fn ranges(table: &Table, default: u32) -> Vec<Range> {
    let Table {
        architecture,
        leaves,
        newer_from,
    } = table;
    let otherwise = vec![statement(RET_K, default)];
    let mut ranges = vec![(0, otherwise.clone())];
    let mut add = |number, code: Vec<Instruction>| match ranges.last_mut() {
        Some((_, last)) if *last == code => {}
        Some((first, last)) if *first == number => *last = code,
        _ => ranges.push((number, code)),
    };
    for (&number, leaf) in leaves {
        add(
            number,
            match leaf {
                Leaf::Always(action) => vec![statement(RET_K, *action)],
                Leaf::Rules(rules) => conditional(*architecture, rules, default),
            },
        );
        let next = number.saturating_add(1);
        if !leaves.contains_key(&next) {
            add(next, otherwise.clone());
        }
    }
    if let Some(number) = *newer_from {
        add(number, vec![statement(RET_K, errno(ENOSYS))]);
    }
    ranges
}

/// Returns a binary search for the number in the accumulator.
fn search(ranges: &[Range], default: u32) -> Vec<Instruction> {
    match ranges {
        [] => vec![statement(RET_K, default)],
        [(_, code)] => code.clone(),
        _ => {
            let (below, from) = ranges.split_at(ranges.len() / 2);
            let middle = from.first().map_or(0, |(number, _)| *number);
            branch(
                JMP_JGE_K,
                middle,
                search(below, default),
                search(from, default),
            )
        }
    }
}

/// Returns code for the first rule that holds, or the default.
fn conditional(architecture: Architecture, rules: &[Rule], default: u32) -> Vec<Instruction> {
    let mut code = Vec::new();
    for rule in rules {
        let mut tests = vec![statement(RET_K, rule.action)];
        for condition in rule.conditions.iter().rev() {
            let mut test = compare(architecture, condition, tests.len());
            test.extend(tests);
            tests = test;
        }
        code.extend(tests);
    }
    code.push(statement(RET_K, default));
    code
}

/// Falls through if the condition holds, otherwise jumps past itself and `rest` more instructions.
fn compare(architecture: Architecture, condition: &Condition, rest: usize) -> Vec<Instruction> {
    let offset = ARGUMENTS + 8 * u32::from(condition.argument);
    let (low, high) = (|value: u64| value as u32, |value: u64| (value >> 32) as u32);
    let Condition {
        operator,
        value,
        value_two,
        ..
    } = *condition;
    let mut steps = Vec::new();
    // The upper half decides, or leaves the decision to the lower one. Arguments of 32-bit programs
    // have none.
    if architecture.is_64_bit() {
        let high_value = high(value);
        steps.push(Step::Load(offset + 4));
        match operator {
            Operator::ScmpCmpEq => steps.push(Step::Test(JMP_JEQ_K, high_value, Go::On, Go::Fail)),
            Operator::ScmpCmpNe => steps.push(Step::Test(JMP_JEQ_K, high_value, Go::On, Go::Hold)),
            Operator::ScmpCmpGt | Operator::ScmpCmpGe => {
                steps.push(Step::Test(JMP_JGT_K, high_value, Go::Hold, Go::On));
                steps.push(Step::Test(JMP_JEQ_K, high_value, Go::On, Go::Fail));
            }
            Operator::ScmpCmpLt | Operator::ScmpCmpLe => {
                steps.push(Step::Test(JMP_JGT_K, high_value, Go::Fail, Go::On));
                steps.push(Step::Test(JMP_JEQ_K, high_value, Go::On, Go::Hold));
            }
            Operator::ScmpCmpMaskedEq => {
                steps.push(Step::Mask(high_value));
                let left = high(value_two & value);
                steps.push(Step::Test(JMP_JEQ_K, left, Go::On, Go::Fail));
            }
        }
    }
    let low_value = low(value);
    steps.push(Step::Load(offset));
    if operator == Operator::ScmpCmpMaskedEq {
        steps.push(Step::Mask(low_value));
    }
    steps.push(match operator {
        Operator::ScmpCmpEq => Step::Test(JMP_JEQ_K, low_value, Go::Hold, Go::Fail),
        Operator::ScmpCmpNe => Step::Test(JMP_JEQ_K, low_value, Go::Fail, Go::Hold),
        Operator::ScmpCmpGt => Step::Test(JMP_JGT_K, low_value, Go::Hold, Go::Fail),
        Operator::ScmpCmpGe => Step::Test(JMP_JGE_K, low_value, Go::Hold, Go::Fail),
        Operator::ScmpCmpLt => Step::Test(JMP_JGE_K, low_value, Go::Fail, Go::Hold),
        Operator::ScmpCmpLe => Step::Test(JMP_JGT_K, low_value, Go::Fail, Go::Hold),
        Operator::ScmpCmpMaskedEq => {
            Step::Test(JMP_JEQ_K, low(value_two & value), Go::Hold, Go::Fail)
        }
    });
    let count = steps.len();
    let instruction = |(at, step)| match step {
        Step::Load(offset) => statement(LD_W_ABS, offset),
        Step::Mask(mask) => statement(ALU_AND_K, mask),
        Step::Test(code, k, holds, fails) => {
            let behind = count.saturating_sub(at + 1);
            let distance = |go| match go {
                Go::On => 0,
                Go::Hold => behind,
                Go::Fail => behind + rest,
            };
            // Six conditions of at most six instructions each: far below 255.
            let reach = |go| u8::try_from(distance(go)).unwrap_or(u8::MAX);
            Instruction {
                code,
                jt: reach(holds),
                jf: reach(fails),
                k,
            }
        }
    };
    steps.into_iter().enumerate().map(instruction).collect()
}

/// A step of a comparison.
enum Step {
    Load(u32),
    Mask(u32),
    /// Instruction, value, and where to go if it holds and if it does not.
    Test(u16, u32, Go, Go),
}

#[derive(Clone, Copy)]
enum Go {
    /// To the next step.
    On,
    /// The condition holds: past the last step.
    Hold,
    /// It does not: past the rule.
    Fail,
}

//! A filter of system calls as the kernel runs it: classic BPF over `struct seccomp_data`
//! (seccomp(2)).
//!
//! Calls are found by binary search of the list of numbers, not by linear search. When a filter is
//! installed, the kernel runs it with each number that it knows, to learn which calls are always
//! allowed: a list of a hundred comparisons makes that the most expensive step of a start.

use std::collections::BTreeMap;

use seccompiler::sock_filter;
pub use seccompiler::{BpfProgram, Error};

// linux/bpf_common.h and linux/filter.h: the codes of instructions.
const LOAD_WORD: u16 = 0x20;
const AND: u16 = 0x54;
const JUMP: u16 = 0x05;
const JUMP_EQUAL: u16 = 0x15;
const JUMP_AT_LEAST: u16 = 0x35;
const RETURN: u16 = 0x06;

// linux/seccomp.h.
const KILL_PROCESS: u32 = 0x8000_0000;
const ERRNO: u32 = 0x0005_0000;
const ALLOW: u32 = 0x7fff_0000;

/// `AUDIT_ARCH_X86_64`.
const ARCH: u32 = 0xc000_003e;

// Offsets in `struct seccomp_data`.
const NUMBER: u32 = 0;
const ARCHITECTURE: u32 = 4;
const ARGUMENTS: u32 = 16;

/// What the kernel does with a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// It is executed.
    Allow,
    /// It fails with this error.
    Fail(u16),
    /// It is executed if all conditions of one of these rules hold; otherwise it is handled like
    /// one that is not listed.
    AllowIf(Vec<Rule>),
}

/// What happens to a call that is not listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Otherwise {
    /// It kills the process.
    Kill,
    /// It fails with this error.
    Fail(u16),
}

/// Conditions that must all hold.
pub type Rule = Vec<Condition>;

/// How much of an argument the kernel uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Width {
    /// 32 bits.
    Word,
    /// 64 bits.
    Double,
}

/// A condition on one argument of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Condition {
    argument: u32,
    width: Width,
    mask: u64,
    value: u64,
    is_equal: bool,
}

impl Condition {
    /// The argument, from 0 to 5, has this value.
    pub fn is(argument: u32, width: Width, value: u64) -> Self {
        Self::masked(argument, width, u64::MAX, value)
    }

    /// Of these bits of the argument, exactly those of `value` are set.
    pub fn masked(argument: u32, width: Width, mask: u64, value: u64) -> Self {
        Self {
            argument,
            width,
            mask,
            value,
            is_equal: true,
        }
    }

    /// The argument's low 32 bits have another value.
    pub fn is_not(argument: u32, value: u64) -> Self {
        Self {
            is_equal: false,
            ..Self::is(argument, Width::Word, value)
        }
    }
}

/// Compiles the program for these calls, by their numbers. A call by the numbers of another
/// architecture kills the process.
#[must_use]
pub fn compile(calls: &BTreeMap<i64, Verdict>, otherwise: Otherwise) -> BpfProgram {
    let mut program = Program::default();
    let kill = program.put(RETURN, KILL_PROCESS);
    let refuse = match otherwise {
        Otherwise::Kill => kill,
        Otherwise::Fail(error) => program.put(RETURN, ERRNO | u32::from(error)),
    };
    let allow = program.put(RETURN, ALLOW);
    let search = program.search(&ranges(calls), Ends { refuse, allow });
    program.go_on_at(search);
    let known = program.put(LOAD_WORD, NUMBER);
    program.branch(JUMP_EQUAL, ARCH, known, kill);
    program.put(LOAD_WORD, ARCHITECTURE);
    program.reversed.reverse();
    program.reversed
}

/// Calls from this number up to the next range's have this verdict; `None` for calls that are not
/// listed.
type Range<'a> = (u32, Option<&'a Verdict>);

/// Sets a filter for the calling thread, and for all threads and processes that it starts,
/// permanently.
///
/// # Errors
/// Fails if the kernel refuses the filter.
pub fn apply(program: &BpfProgram) -> Result<(), Error> {
    seccompiler::apply_filter(program)
}

/// Returns all numbers in as few ranges as there are changes.
fn ranges(calls: &BTreeMap<i64, Verdict>) -> Vec<Range<'_>> {
    let mut ranges: Vec<Range<'_>> = vec![(0, None)];
    let mut add = |from: u32, verdict| match ranges.last_mut() {
        Some(last) if last.1 == verdict => {}
        Some(last) if last.0 == from => last.1 = verdict,
        _ => ranges.push((from, verdict)),
    };
    for (number, verdict) in calls {
        let Ok(number) = u32::try_from(*number) else {
            continue;
        };
        add(number, Some(verdict));
        if !calls.contains_key(&i64::from(number + 1)) {
            add(number + 1, None);
        }
    }
    ranges
}

/// An instruction, counted from the end of the program.
type Label = usize;

/// Where most paths end.
#[derive(Debug, Clone, Copy)]
struct Ends {
    refuse: Label,
    allow: Label,
}

/// A program that is written from its end: BPF only jumps forwards, so the targets of an
/// instruction exist already.
#[derive(Debug, Default)]
struct Program {
    reversed: Vec<sock_filter>,
}

impl Program {
    /// Adds an instruction that continues at the one that was added before it.
    fn put(&mut self, code: u16, k: u32) -> Label {
        let (jt, jf) = (0, 0);
        self.reversed.push(sock_filter { code, jt, jf, k });
        self.reversed.len() - 1
    }

    /// Returns how many instructions the next one must skip to get there.
    fn distance(&self, label: Label) -> usize {
        self.reversed.len() - label - 1
    }

    /// Makes the next instruction continue at `label`.
    fn go_on_at(&mut self, label: Label) -> Label {
        match self.distance(label) {
            0 => label,
            skipped => self.put(JUMP, u32::try_from(skipped).unwrap_or(u32::MAX)),
        }
    }

    /// Adds a jump that depends on a comparison with `k`. A target that is too far away gets an
    /// intermediate jump.
    fn branch(&mut self, code: u16, k: u32, then: Label, otherwise: Label) -> Label {
        // The second intermediate jump is one more to skip for the first.
        const NEAR: usize = u8::MAX as usize - 1;
        let mut near = |label| match self.distance(label) {
            0..NEAR => label,
            _ => self.go_on_at(label),
        };
        let (then, otherwise) = (near(then), near(otherwise));
        let skip = |label| u8::try_from(self.distance(label)).unwrap_or(u8::MAX);
        let (jt, jf) = (skip(then), skip(otherwise));
        self.reversed.push(sock_filter { code, jt, jf, k });
        self.reversed.len() - 1
    }

    /// Looks up the call's number, which is loaded.
    fn search(&mut self, ranges: &[Range<'_>], ends: Ends) -> Label {
        let (below, from) = ranges.split_at(ranges.len() / 2);
        match (below, from) {
            ([], [(_, verdict), ..]) => self.verdict(*verdict, ends),
            (_, [(middle, _), ..]) => {
                let above = self.search(from, ends);
                let below = self.search(below, ends);
                self.branch(JUMP_AT_LEAST, *middle, above, below)
            }
            (_, []) => ends.refuse,
        }
    }

    fn verdict(&mut self, verdict: Option<&Verdict>, ends: Ends) -> Label {
        match verdict {
            None => ends.refuse,
            Some(Verdict::Allow) => ends.allow,
            Some(Verdict::Fail(error)) => self.put(RETURN, ERRNO | u32::from(*error)),
            Some(Verdict::AllowIf(rules)) => rules.iter().rev().fold(ends.refuse, |next, rule| {
                let conditions = rule.iter().rev();
                conditions.fold(ends.allow, |then, condition| {
                    self.condition(*condition, then, next)
                })
            }),
        }
    }

    /// Continues at `then` if the condition holds.
    fn condition(&mut self, condition: Condition, then: Label, otherwise: Label) -> Label {
        let low = ARGUMENTS + 8 * condition.argument;
        let mut then = then;
        for (offset, shift) in [(low + 4, 32), (low, 0)] {
            if shift > 0 && condition.width == Width::Word {
                continue;
            }
            let value = word(condition.value >> shift);
            match condition.is_equal {
                true => self.branch(JUMP_EQUAL, value, then, otherwise),
                false => self.branch(JUMP_EQUAL, value, otherwise, then),
            };
            let mask = word(condition.mask >> shift);
            if mask != u32::MAX {
                self.put(AND, mask);
            }
            then = self.put(LOAD_WORD, offset);
        }
        then
    }
}

fn word(value: u64) -> u32 {
    (value & u64::from(u32::MAX)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Interprets the program like the kernel.
    fn run(program: &[sock_filter], arch: u32, number: u32, arguments: [u64; 6]) -> u32 {
        let load = |offset: u32| match offset {
            NUMBER => number,
            ARCHITECTURE => arch,
            _ => {
                let argument = arguments[((offset - ARGUMENTS) / 8) as usize];
                word(argument >> (if offset.is_multiple_of(8) { 0 } else { 32 }))
            }
        };
        let (mut at, mut accumulator) = (0, 0);
        loop {
            let one = &program[at];
            at += 1;
            let jump = |taken: bool| usize::from(if taken { one.jt } else { one.jf });
            match one.code {
                LOAD_WORD => accumulator = load(one.k),
                AND => accumulator &= one.k,
                JUMP => at += one.k as usize,
                JUMP_EQUAL => at += jump(accumulator == one.k),
                JUMP_AT_LEAST => at += jump(accumulator >= one.k),
                RETURN => return one.k,
                code => panic!("{code:#x}"),
            }
        }
    }

    fn verdict(calls: &BTreeMap<i64, Verdict>, number: u32, arguments: [u64; 6]) -> u32 {
        run(&compile(calls, Otherwise::Kill), ARCH, number, arguments)
    }

    #[test]
    fn each_call_gets_its_own_verdict_and_all_others_kill() {
        // Single, adjacent, with holes, at both ends, and so many that jumps are long.
        let mut calls = BTreeMap::from([(0, Verdict::Allow), (1, Verdict::Fail(38))]);
        for number in 300..900_i64 {
            match number % 5 {
                0 => calls.insert(number, Verdict::Allow),
                1 => calls.insert(number, Verdict::Fail(1)),
                2 => {
                    let rule = vec![Condition::is(0, Width::Word, 7)];
                    calls.insert(number, Verdict::AllowIf(vec![rule]))
                }
                _ => None,
            };
        }
        for number in 0..1000 {
            let expected = match calls.get(&i64::from(number)) {
                Some(Verdict::Allow) => ALLOW,
                Some(Verdict::Fail(error)) => ERRNO | u32::from(*error),
                Some(Verdict::AllowIf(_)) | None => KILL_PROCESS,
            };
            assert_eq!(verdict(&calls, number, [0; 6]), expected, "{number}");
        }
        // The numbers of the x32 ABI have an extra bit.
        assert_eq!(verdict(&calls, 0x4000_0000, [0; 6]), KILL_PROCESS);
        assert_eq!(
            run(&compile(&calls, Otherwise::Kill), 0x4000_0003, 0, [0; 6]),
            KILL_PROCESS
        );
    }

    #[test]
    fn what_is_not_listed_may_fail_instead() {
        let rule = vec![Condition::is(0, Width::Word, 7)];
        let calls = BTreeMap::from([(3, Verdict::Allow), (5, Verdict::AllowIf(vec![rule]))]);
        let program = compile(&calls, Otherwise::Fail(1));
        let of = |number, argument| run(&program, ARCH, number, [argument, 0, 0, 0, 0, 0]);
        assert_eq!((of(3, 0), of(5, 7)), (ALLOW, ALLOW));
        for (number, argument) in [(0, 0), (4, 0), (5, 8), (6, 7), (u32::MAX, 0)] {
            assert_eq!(of(number, argument), ERRNO | 1, "{number}");
        }
        assert_eq!(run(&program, 0x4000_0003, 3, [0; 6]), KILL_PROCESS);
    }

    #[test]
    fn one_rule_whose_conditions_all_hold_is_enough() {
        let rules = vec![
            vec![
                Condition::masked(1, Width::Word, 0xff00, 0xae00),
                Condition::is_not(1, 0xae01),
            ],
            vec![Condition::is(2, Width::Double, 1 << 40)],
        ];
        let calls = BTreeMap::from([(16, Verdict::AllowIf(rules))]);
        let allowed = |arguments| verdict(&calls, 16, arguments) == ALLOW;
        assert!(allowed([0, 0xae02, 0, 0, 0, 0]));
        // The kernel treats the request as a 32-bit number.
        assert!(allowed([0, 0xf_0000_ae02, 0, 0, 0, 0]));
        assert!(!allowed([0, 0xae01, 0, 0, 0, 0]));
        assert!(!allowed([0, 0xaf02, 0, 0, 0, 0]));
        assert!(allowed([0, 0, 1 << 40, 0, 0, 0]));
        for other in [0, 1, 1 << 41, (1 << 40) | 1] {
            assert!(!allowed([0, 0, other, 0, 0, 0]), "{other:#x}");
        }
    }
}

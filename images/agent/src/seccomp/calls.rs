//! Architectures of the guest's kernel, and their system call numbers.

use oci_spec::runtime::LinuxSeccompOperator;
use syscalls::{x86, x86_64};

use super::condition::Condition;

/// The architecture of a call, as the kernel reports it to a filter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Architecture {
    X86_64,
    /// 32-bit programs.
    X86,
}

/// A call that is made through another one.
#[derive(Debug, Clone, Copy)]
pub(super) struct Multiplexed {
    /// The number of the other call.
    pub(super) call: u32,
    /// The condition that its first argument selects this one.
    pub(super) function: Condition,
}

/// `socketcall` and `ipc` of 32-bit programs.
const SOCKETCALL: u32 = 102;
const IPC: u32 = 117;

impl Architecture {
    /// `AUDIT_ARCH_*` of linux/audit.h.
    pub(super) fn audit(self) -> u32 {
        match self {
            Self::X86_64 => 0xc000_003e,
            Self::X86 => 0x4000_0003,
        }
    }

    pub(super) fn is_64_bit(self) -> bool {
        self == Self::X86_64
    }

    /// Returns the number of the call of this name, if there is one.
    pub(super) fn number(self, name: &str) -> Option<u32> {
        match self {
            Self::X86_64 => Some(name.parse::<x86_64::Sysno>().ok()?.id().cast_unsigned()),
            Self::X86 => Some(name.parse::<x86::Sysno>().ok()?.id().cast_unsigned()),
        }
    }

    /// Returns the other way to make a call: 32-bit C libraries made these through one number until
    /// Linux 4.3.
    pub(super) fn multiplexed(self, name: &str) -> Option<Multiplexed> {
        if self == Self::X86_64 {
            return None;
        }
        // linux/net.h, linux/ipc.h
        let (call, function) = match name {
            "socket" => (SOCKETCALL, 1),
            "bind" => (SOCKETCALL, 2),
            "connect" => (SOCKETCALL, 3),
            "listen" => (SOCKETCALL, 4),
            "accept" => (SOCKETCALL, 5),
            "getsockname" => (SOCKETCALL, 6),
            "getpeername" => (SOCKETCALL, 7),
            "socketpair" => (SOCKETCALL, 8),
            "send" => (SOCKETCALL, 9),
            "recv" => (SOCKETCALL, 10),
            "sendto" => (SOCKETCALL, 11),
            "recvfrom" => (SOCKETCALL, 12),
            "shutdown" => (SOCKETCALL, 13),
            "setsockopt" => (SOCKETCALL, 14),
            "getsockopt" => (SOCKETCALL, 15),
            "sendmsg" => (SOCKETCALL, 16),
            "recvmsg" => (SOCKETCALL, 17),
            "accept4" => (SOCKETCALL, 18),
            "recvmmsg" => (SOCKETCALL, 19),
            "sendmmsg" => (SOCKETCALL, 20),
            "semop" => (IPC, 1),
            "semget" => (IPC, 2),
            "semctl" => (IPC, 3),
            "semtimedop" => (IPC, 4),
            "msgsnd" => (IPC, 11),
            "msgrcv" => (IPC, 12),
            "msgget" => (IPC, 13),
            "msgctl" => (IPC, 14),
            "shmat" => (IPC, 21),
            "shmdt" => (IPC, 22),
            "shmget" => (IPC, 23),
            "shmctl" => (IPC, 24),
            _ => return None,
        };
        Some(Multiplexed {
            call,
            function: Condition {
                argument: 0,
                operator: LinuxSeccompOperator::ScmpCmpEq,
                value: function,
                value_two: 0,
            },
        })
    }
}

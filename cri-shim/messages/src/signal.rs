//! Signals, by the numbers of the interface.

use prost::Enumeration;

/// A signal. The numbers are not those of Linux.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Enumeration)]
#[repr(i32)]
pub enum Signal {
    /// The one of the image, or else of the runtime.
    RuntimeDefault = 0,
    /// `SIGABRT`.
    Sigabrt = 1,
    /// `SIGALRM`.
    Sigalrm = 2,
    /// `SIGBUS`.
    Sigbus = 3,
    /// `SIGCHLD`.
    Sigchld = 4,
    /// `SIGCLD`.
    Sigcld = 5,
    /// `SIGCONT`.
    Sigcont = 6,
    /// `SIGFPE`.
    Sigfpe = 7,
    /// `SIGHUP`.
    Sighup = 8,
    /// `SIGILL`.
    Sigill = 9,
    /// `SIGINT`.
    Sigint = 10,
    /// `SIGIO`.
    Sigio = 11,
    /// `SIGIOT`.
    Sigiot = 12,
    /// `SIGKILL`.
    Sigkill = 13,
    /// `SIGPIPE`.
    Sigpipe = 14,
    /// `SIGPOLL`.
    Sigpoll = 15,
    /// `SIGPROF`.
    Sigprof = 16,
    /// `SIGPWR`.
    Sigpwr = 17,
    /// `SIGQUIT`.
    Sigquit = 18,
    /// `SIGSEGV`.
    Sigsegv = 19,
    /// `SIGSTKFLT`.
    Sigstkflt = 20,
    /// `SIGSTOP`.
    Sigstop = 21,
    /// `SIGSYS`.
    Sigsys = 22,
    /// `SIGTERM`.
    Sigterm = 23,
    /// `SIGTRAP`.
    Sigtrap = 24,
    /// `SIGTSTP`.
    Sigtstp = 25,
    /// `SIGTTIN`.
    Sigttin = 26,
    /// `SIGTTOU`.
    Sigttou = 27,
    /// `SIGURG`.
    Sigurg = 28,
    /// `SIGUSR1`.
    Sigusr1 = 29,
    /// `SIGUSR2`.
    Sigusr2 = 30,
    /// `SIGVTALRM`.
    Sigvtalrm = 31,
    /// `SIGWINCH`.
    Sigwinch = 32,
    /// `SIGXCPU`.
    Sigxcpu = 33,
    /// `SIGXFSZ`.
    Sigxfsz = 34,
    /// `SIGRTMIN`.
    Sigrtmin = 35,
    /// `SIGRTMIN+1`.
    Sigrtminplus1 = 36,
    /// `SIGRTMIN+2`.
    Sigrtminplus2 = 37,
    /// `SIGRTMIN+3`.
    Sigrtminplus3 = 38,
    /// `SIGRTMIN+4`.
    Sigrtminplus4 = 39,
    /// `SIGRTMIN+5`.
    Sigrtminplus5 = 40,
    /// `SIGRTMIN+6`.
    Sigrtminplus6 = 41,
    /// `SIGRTMIN+7`.
    Sigrtminplus7 = 42,
    /// `SIGRTMIN+8`.
    Sigrtminplus8 = 43,
    /// `SIGRTMIN+9`.
    Sigrtminplus9 = 44,
    /// `SIGRTMIN+10`.
    Sigrtminplus10 = 45,
    /// `SIGRTMIN+11`.
    Sigrtminplus11 = 46,
    /// `SIGRTMIN+12`.
    Sigrtminplus12 = 47,
    /// `SIGRTMIN+13`.
    Sigrtminplus13 = 48,
    /// `SIGRTMIN+14`.
    Sigrtminplus14 = 49,
    /// `SIGRTMIN+15`.
    Sigrtminplus15 = 50,
    /// `SIGRTMAX-14`.
    Sigrtmaxminus14 = 51,
    /// `SIGRTMAX-13`.
    Sigrtmaxminus13 = 52,
    /// `SIGRTMAX-12`.
    Sigrtmaxminus12 = 53,
    /// `SIGRTMAX-11`.
    Sigrtmaxminus11 = 54,
    /// `SIGRTMAX-10`.
    Sigrtmaxminus10 = 55,
    /// `SIGRTMAX-9`.
    Sigrtmaxminus9 = 56,
    /// `SIGRTMAX-8`.
    Sigrtmaxminus8 = 57,
    /// `SIGRTMAX-7`.
    Sigrtmaxminus7 = 58,
    /// `SIGRTMAX-6`.
    Sigrtmaxminus6 = 59,
    /// `SIGRTMAX-5`.
    Sigrtmaxminus5 = 60,
    /// `SIGRTMAX-4`.
    Sigrtmaxminus4 = 61,
    /// `SIGRTMAX-3`.
    Sigrtmaxminus3 = 62,
    /// `SIGRTMAX-2`.
    Sigrtmaxminus2 = 63,
    /// `SIGRTMAX-1`.
    Sigrtmaxminus1 = 64,
    /// `SIGRTMAX`.
    Sigrtmax = 65,
}

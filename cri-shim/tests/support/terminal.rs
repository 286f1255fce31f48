//! A user's side of a terminal.

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};

use rustix::fs::OFlags;
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize};

/// A pseudo-terminal: the user's side, and podvisor's.
pub(crate) struct Terminal {
    pub(crate) person: fs::File,
    program: OwnedFd,
}

impl Terminal {
    pub(crate) fn new(rows: u16, columns: u16) -> Self {
        let person =
            openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&person).unwrap();
        unlockpt(&person).unwrap();
        let path = ptsname(&person, Vec::new()).unwrap();
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let program = rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).unwrap();
        let terminal = Self {
            person: person.into(),
            program,
        };
        terminal.resize(rows, columns);
        terminal
    }

    pub(crate) fn resize(&self, rows: u16, columns: u16) {
        let size = Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        tcsetwinsize(&self.program, size).unwrap();
    }

    pub(crate) fn spawn(&self, mut command: Command) -> Child {
        let end = || Stdio::from(self.program.try_clone().unwrap());
        command
            .stdin(end())
            .stdout(end())
            .stderr(end())
            .spawn()
            .unwrap()
    }

    pub(crate) fn echoes(&self) -> bool {
        let modes = tcgetattr(&self.program).unwrap().local_modes;
        modes.contains(LocalModes::ECHO | LocalModes::ICANON)
    }

    pub(crate) fn read_until(&mut self, text: &str) -> String {
        read_until(&mut self.person, text)
    }
}

/// Reads until `text` has arrived, and returns everything up to it.
pub(crate) fn read_until(from: &mut impl Read, text: &str) -> String {
    let mut seen = Vec::new();
    while !String::from_utf8_lossy(&seen).contains(text) {
        let mut buffer = [0; 1024];
        let count = from.read(&mut buffer).unwrap();
        assert_ne!(count, 0, "{}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&buffer[..count]);
    }
    String::from_utf8_lossy(&seen).into_owned()
}

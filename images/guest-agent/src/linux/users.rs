//! Who is there (`/etc/passwd`), and who is logged in: utmp has it, or systemd where a distribution
//! has no utmp any more.

use std::fs::{self, File};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::text::{MAX_FILE, read_text};
use crate::protocol::Fault;

/// A record of utmp on x86-64 (utmp(5)), and where its fields are.
const RECORD: usize = 384;
const KIND: usize = 0;
const USER: std::ops::Range<usize> = 44..76;
const SECONDS: usize = 340;
const MICROSECONDS: usize = 344;
const USER_PROCESS: i16 = 7;

/// Most sessions that are looked at.
const MAX_SESSIONS: usize = 4096;

/// A user, as `/etc/passwd` has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct User {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) home: PathBuf,
}

/// Looks for a user.
pub(super) fn find(root: &Path, name: &str) -> Result<User, Fault> {
    let path = root.join("etc/passwd");
    let text = read_text(&path);
    let text = text.map_err(|error| Fault::io("read", "/etc/passwd", &error))?;
    let mut users = text.lines().filter_map(|line| {
        let mut fields = line.split(':');
        let is_it = fields.next()? == name;
        let (uid, gid) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
        let home = PathBuf::from(fields.nth(1)?);
        (is_it && home.is_absolute()).then_some(User { uid, gid, home })
    });
    users.next().ok_or_else(|| {
        let shown: String = name.chars().take(64).collect();
        Fault::new(format!("/etc/passwd has no user '{shown}' with a home"))
    })
}

/// A user who is logged in, and since when in seconds.
type Session = (String, f64);

pub(super) fn logged_in(root: &Path) -> Value {
    let mut bytes = Vec::new();
    let utmp = File::open(root.join("run/utmp"));
    let read = utmp.and_then(|file| file.take(MAX_FILE).read_to_end(&mut bytes));
    let sessions = match read {
        Ok(_) => of_utmp(&bytes),
        Err(_) => of_systemd(&root.join("run/systemd/sessions")),
    };
    let mut users: Vec<Session> = Vec::new();
    for (name, since) in sessions {
        match users.iter_mut().find(|(known, _)| *known == name) {
            Some((_, first)) => *first = first.min(since),
            None => users.push((name, since)),
        }
    }
    let shown = |(user, since)| json!({ "user": user, "login-time": since });
    users.into_iter().map(shown).collect()
}

fn of_utmp(bytes: &[u8]) -> Vec<Session> {
    let session = |record: &[u8]| {
        let number = |at: usize| {
            let bytes = record.get(at..at.checked_add(4)?)?;
            Some(i32::from_ne_bytes(bytes.try_into().ok()?))
        };
        let kind = record.get(KIND..KIND + 2)?;
        if i16::from_ne_bytes(kind.try_into().ok()?) != USER_PROCESS {
            return None;
        }
        let name = record.get(USER)?.split(|byte| *byte == 0).next()?;
        let name = String::from_utf8_lossy(name).into_owned();
        let since = f64::from(number(SECONDS)?) + f64::from(number(MICROSECONDS)?) / 1e6;
        (!name.is_empty()).then_some((name, since))
    };
    bytes.chunks_exact(RECORD).filter_map(session).collect()
}

fn of_systemd(directory: &Path) -> Vec<Session> {
    let Ok(entries) = fs::read_dir(directory) else {
        return Vec::new();
    };
    let session = |path: PathBuf| {
        if !path.is_file() {
            return None;
        }
        let text = read_text(&path).ok()?;
        let field = |name: &str| {
            let mut lines = text.lines().filter_map(|line| line.split_once('='));
            lines.find(|(key, _)| *key == name).map(|(_, value)| value)
        };
        // Not a service manager's, nor a login screen.
        if !field("CLASS")?.starts_with("user") || field("CLASS")? == "user-incomplete" {
            return None;
        }
        let since = field("REALTIME").and_then(|text| text.parse::<u64>().ok());
        let since = std::time::Duration::from_micros(since.unwrap_or(0));
        Some((field("USER")?.to_owned(), since.as_secs_f64()))
    };
    let paths = entries.flatten().take(MAX_SESSIONS).map(|it| it.path());
    paths.filter_map(session).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(kind: i16, name: &str, seconds: i32) -> Vec<u8> {
        let mut record = vec![0; RECORD];
        record[..2].copy_from_slice(&kind.to_ne_bytes());
        record[USER][..name.len()].copy_from_slice(name.as_bytes());
        record[SECONDS..SECONDS + 4].copy_from_slice(&seconds.to_ne_bytes());
        record[MICROSECONDS..MICROSECONDS + 4].copy_from_slice(&500_000_i32.to_ne_bytes());
        record
    }

    #[test]
    fn who_is_logged_in_twice_is_there_once_with_the_first_time() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("run")).unwrap();
        let mut utmp = [
            record(2, "reboot", 1),
            record(USER_PROCESS, "me", 20),
            record(USER_PROCESS, "other", 30),
            record(USER_PROCESS, "me", 10),
            record(8, "gone", 5),
        ]
        .concat();
        utmp.extend([7, 0, 0]);
        fs::write(dir.path().join("run/utmp"), utmp).unwrap();
        assert_eq!(
            logged_in(dir.path()),
            json!([
                { "user": "me", "login-time": 10.5 },
                { "user": "other", "login-time": 30.5 },
            ])
        );
    }

    #[test]
    fn without_utmp_systemd_is_asked() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(logged_in(dir.path()), json!([]));
        let sessions = dir.path().join("run/systemd/sessions");
        fs::create_dir_all(&sessions).unwrap();
        for (name, text) in [
            ("1", "UID=0\nUSER=me\nCLASS=user\nREALTIME=1500000\n"),
            ("2", "USER=me\nCLASS=manager\nREALTIME=1\n"),
            ("3", "CLASS=user\n"),
        ] {
            fs::write(sessions.join(name), text).unwrap();
        }
        let users = logged_in(dir.path());
        assert_eq!(users, json!([{ "user": "me", "login-time": 1.5 }]));
    }

    #[test]
    fn a_user_is_found_by_name_and_needs_a_home() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("etc")).unwrap();
        let text = "broken\nnohome:x:1:1::relative:/bin/sh\nme:x:1000:1001:Me,:/home/me:/bin/sh\n";
        fs::write(dir.path().join("etc/passwd"), text).unwrap();
        let user = find(dir.path(), "me").unwrap();
        assert_eq!((user.uid, user.gid), (1000, 1001));
        assert_eq!(user.home, Path::new("/home/me"));
        for name in ["", "nobody", "nohome", "broken"] {
            let fault = find(dir.path(), name).unwrap_err();
            assert!(fault.desc.contains(name), "{fault}");
        }
    }
}

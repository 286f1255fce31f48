//! Speaks with the monitors of both sides: QEMU by QMP, podvisor's program by lines.
#![allow(unsafe_code)] // a descriptor that a child inherits

use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use super::console::Side;
use crate::boot::Kind;

/// The time limit for an answer, also on an emulated host.
const PATIENCE: Duration = Duration::from_secs(120);

/// The connection to one monitor.
#[derive(Debug)]
pub(super) struct Control {
    kind: Kind,
    stream: BufReader<UnixStream>,
}

/// The monitor's end of a connection, which every child inherits until it is dropped.
#[derive(Debug)]
pub(super) struct MonitorsEnd(UnixStream);

impl MonitorsEnd {
    /// Returns what a monitor of this kind is started with.
    pub(super) fn arguments(&self, kind: Kind, side: Side) -> Vec<String> {
        let number = self.0.as_raw_fd();
        let words: &[&str] = match (kind, side) {
            (Kind::Qemu, Side::Source) => &[],
            (Kind::Qemu, Side::Target) => &["-incoming", "defer"],
            (_, Side::Source) => &["source"],
            (_, Side::Target) => &["target"],
        };
        let mut arguments: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        match kind {
            Kind::Qemu => arguments.extend([
                "-chardev".to_owned(),
                format!("socket,id=control,fd={number}"),
                "-mon".to_owned(),
                "chardev=control,mode=control".to_owned(),
            ]),
            _ => arguments.push(number.to_string()),
        }
        arguments
    }
}

impl Control {
    /// Makes a connection.
    pub(super) fn new(kind: Kind) -> Result<(Self, MonitorsEnd)> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(PATIENCE))?;
        ours.set_write_timeout(Some(PATIENCE))?;
        // SAFETY: clears FD_CLOEXEC of a descriptor of ours.
        if unsafe { libc::fcntl(theirs.as_raw_fd(), libc::F_SETFD, 0) } != 0 {
            let error = io::Error::last_os_error();
            return Err(error).context("a socket cannot be left to children");
        }
        let stream = BufReader::new(ours);
        Ok((Self { kind, stream }, MonitorsEnd(theirs)))
    }

    /// Has a target wait for a guest on a socket.
    pub(super) fn receive(&mut self, socket: &Path) -> Result<()> {
        match self.kind {
            Kind::Qemu => {
                self.begin_qmp()?;
                let uri = format!("unix:{}", socket.display());
                self.execute("migrate-incoming", &json!({ "uri": uri }))
            }
            _ => {
                self.say(&format!("receive {}", socket.display()))?;
                let answer = self.line()?;
                match answer.trim() {
                    "listening" => Ok(()),
                    _ => bail!("the target answers {answer:?}"),
                }
            }
        }
    }

    /// Makes a source ready: all that has to be set before it sends its guest.
    pub(super) fn prepare(&mut self, downtime: u32) -> Result<()> {
        if self.kind != Kind::Qemu {
            return Ok(());
        }
        self.begin_qmp()?;
        let events = json!([{ "capability": "events", "state": true }]);
        self.execute(
            "migrate-set-capabilities",
            &json!({ "capabilities": events }),
        )?;
        // As fast as it gets, as podvisor sends.
        let parameters = json!({ "max-bandwidth": 0, "downtime-limit": downtime });
        self.execute("migrate-set-parameters", &parameters)
    }

    /// Has a source send its guest to a socket.
    pub(super) fn send(&mut self, socket: &Path, downtime: u32) -> Result<()> {
        let path = socket.display();
        match self.kind {
            Kind::Qemu => self.execute("migrate", &json!({ "uri": format!("unix:{path}") })),
            _ => self.say(&format!("send {path} {downtime}")),
        }
    }

    /// Waits until a source knows that its guest has gone; returns the bytes that it sent, and the
    /// downtime by its own clock.
    pub(super) fn sent(&mut self) -> Result<Sent> {
        if self.kind != Kind::Qemu {
            return Sent::of_line(&self.line()?);
        }
        loop {
            let message = self.message()?;
            match message["data"]["status"].as_str() {
                Some("completed") => break,
                Some("failed" | "cancelled") => bail!("the migration has failed: {message}"),
                _ => {}
            }
        }
        self.command("query-migrate", &json!({}))?;
        let answer = self.answer("query-migrate")?;
        Sent::of_qmp(&answer).with_context(|| format!("query-migrate answers {answer}"))
    }

    fn begin_qmp(&mut self) -> Result<()> {
        // Its greeting.
        self.message()?;
        self.execute("qmp_capabilities", &json!({}))
    }

    fn execute(&mut self, command: &str, arguments: &Value) -> Result<()> {
        self.command(command, arguments)?;
        self.answer(command).map(drop)
    }

    fn command(&mut self, command: &str, arguments: &Value) -> Result<()> {
        self.say(&json!({ "execute": command, "arguments": arguments }).to_string())
    }

    /// Returns the answer to a command; events before it are left out.
    fn answer(&mut self, command: &str) -> Result<Value> {
        loop {
            let mut message = self.message()?;
            if let Some(error) = message.get("error") {
                bail!("QEMU refuses {command}: {error}");
            }
            if let Some(answer) = message.get_mut("return") {
                return Ok(answer.take());
            }
        }
    }

    fn message(&mut self) -> Result<Value> {
        let line = self.line()?;
        serde_json::from_str(&line).with_context(|| format!("QEMU says {line:?}"))
    }

    fn say(&mut self, line: &str) -> Result<()> {
        writeln!(self.stream.get_mut(), "{line}").context("the monitor does not listen")
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = self.stream.read_line(&mut line);
        match read.context("the monitor does not answer")? {
            0 => bail!("the monitor has ended"),
            _ => Ok(line),
        }
    }
}

/// What a source knows of a guest that has gone.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Sent {
    pub(super) bytes: u64,
    pub(super) downtime_ms: f64,
}

impl Sent {
    /// Of podvisor's `sent BYTES MICROSECONDS`.
    fn of_line(line: &str) -> Result<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["sent", bytes, micros] = *words else {
            bail!("the source answers {line:?}");
        };
        Ok(Self {
            bytes: bytes.parse()?,
            downtime_ms: micros.parse::<f64>()? / 1e3,
        })
    }

    /// Of QEMU's `query-migrate`.
    fn of_qmp(answer: &Value) -> Option<Self> {
        Some(Self {
            bytes: answer["ram"]["transferred"].as_u64()?,
            downtime_ms: answer["downtime"].as_f64()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_monitors_tell_what_they_sent() {
        let sent = Sent::of_line("sent 4096 1500\n").unwrap();
        assert_eq!((sent.bytes, sent.downtime_ms), (4096, 1.5));
        assert!(Sent::of_line("no\n").is_err());
        let answer = json!({ "downtime": 3, "ram": { "transferred": 9 } });
        let sent = Sent::of_qmp(&answer).unwrap();
        assert_eq!((sent.bytes, sent.downtime_ms), (9, 3.0));
        assert_eq!(Sent::of_qmp(&json!({ "downtime": 3 })), None);
    }

    #[test]
    fn qmp_is_spoken_until_the_guest_has_gone() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut control = Control {
            kind: Kind::Qemu,
            stream: BufReader::new(ours),
        };
        let said = [
            r#"{"QMP": {}}"#,
            r#"{"return": {}}"#,
            r#"{"return": {}}"#,
            r#"{"return": {}}"#,
            r#"{"event": "STOP"}"#,
            r#"{"return": {}}"#,
            r#"{"event": "MIGRATION", "data": {"status": "active"}}"#,
            r#"{"event": "MIGRATION", "data": {"status": "completed"}}"#,
            r#"{"return": {"downtime": 2, "ram": {"transferred": 7}}}"#,
        ];
        (&theirs)
            .write_all((said.join("\n") + "\n").as_bytes())
            .unwrap();
        control.prepare(300).unwrap();
        control.send(Path::new("/x"), 300).unwrap();
        let sent = control.sent().unwrap();
        assert_eq!((sent.bytes, sent.downtime_ms), (7, 2.0));
        (&theirs).write_all(b"{\"error\": \"no\"}\n").unwrap();
        assert!(control.execute("migrate", &json!({})).is_err());
    }
}

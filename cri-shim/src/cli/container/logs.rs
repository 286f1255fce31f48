//! `podvisor logs`: what a container wrote.

use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _, Write};
use std::os::fd::OwnedFd;
use std::time::{Duration, SystemTime};

use anyhow::Context as _;
use clap::Args;
use rustix::fs::inotify;
use tokio::io::unix::AsyncFd;

use super::{Containers, Entry, State, sweep};
use crate::cli::Globals;
use crate::sandbox::watch::readable;

/// Longest line of a log: its text is at most 16 KiB.
const LINE_MAX: u64 = 64 << 10;

#[derive(Debug, Args)]
pub(in crate::cli) struct LogsArgs {
    /// Go on with what it writes from now on
    #[arg(short, long)]
    follow: bool,

    /// Only what was written since then: 10m, or 2026-01-31T12:00:00Z
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    since: Option<SystemTime>,

    /// Only what was written before then
    #[arg(long, value_name = "TIME", value_parser = parse_time)]
    until: Option<SystemTime>,

    /// Begin each line with its time
    #[arg(short, long)]
    timestamps: bool,

    /// Only so many of the last lines
    #[arg(short = 'n', long, value_name = "LINES")]
    tail: Option<usize>,

    /// Name or id
    #[arg(value_name = "CONTAINER")]
    container: String,
}

pub(super) fn parse_time(text: &str) -> Result<SystemTime, String> {
    if let Ok(seconds) = text.parse::<u64>() {
        let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(seconds));
        return time.ok_or_else(|| "no clock goes so far".to_owned());
    }
    if let Ok(age) = humantime::parse_duration(text) {
        return Ok(SystemTime::now()
            .checked_sub(age)
            .unwrap_or(SystemTime::UNIX_EPOCH));
    }
    humantime::parse_rfc3339_weak(text).map_err(|_| "write 10m or 2026-01-31T12:00:00Z".to_owned())
}

/// A line of the log.
#[derive(Debug, PartialEq, Eq)]
struct Line<'a> {
    time: &'a str,
    is_stderr: bool,
    /// The program's line ends here.
    is_whole: bool,
    text: &'a [u8],
}

fn parse_line(line: &[u8]) -> Option<Line<'_>> {
    let line = line.strip_suffix(b"\n").unwrap_or(line);
    let mut parts = line.splitn(4, |byte| *byte == b' ');
    Some(Line {
        time: str::from_utf8(parts.next()?).ok()?,
        is_stderr: parts.next()? == b"stderr",
        is_whole: parts.next()? == b"F",
        text: parts.next()?,
    })
}

impl LogsArgs {
    fn takes(&self, line: &Line<'_>) -> bool {
        let Ok(time) = humantime::parse_rfc3339(line.time) else {
            return false;
        };
        self.since.is_none_or(|since| time >= since) && self.until.is_none_or(|until| time < until)
    }

    fn print(&self, line: &Line<'_>) -> io::Result<()> {
        let mut text = Vec::with_capacity(line.text.len() + 40);
        if self.timestamps {
            text.extend_from_slice(line.time.as_bytes());
            text.push(b' ');
        }
        text.extend_from_slice(line.text);
        if line.is_whole || self.timestamps {
            text.push(b'\n');
        }
        match line.is_stderr {
            true => io::stderr().write_all(&text),
            false => io::stdout().write_all(&text),
        }
    }
}

/// The log, read line by line; what has not ended yet waits for its rest.
struct Reader {
    file: BufReader<File>,
    begun: Vec<u8>,
}

impl Reader {
    fn next(&mut self) -> io::Result<Option<Vec<u8>>> {
        let room = LINE_MAX.saturating_sub(self.begun.len() as u64);
        (&mut self.file)
            .take(room)
            .read_until(b'\n', &mut self.begun)?;
        let is_whole = self.begun.last() == Some(&b'\n') || self.begun.len() as u64 >= LINE_MAX;
        Ok(is_whole.then(|| std::mem::take(&mut self.begun)))
    }
}

pub(in crate::cli) fn run(globals: &Globals, args: &LogsArgs) -> anyhow::Result<u8> {
    let containers = Containers::open(&globals.root()?)?;
    let runtime = crate::cli::runtime()?;
    let done = runtime.block_on(async {
        sweep(&containers).await?;
        let entry = containers.find(&args.container)?;
        show(args, &entry).await
    });
    match done {
        // Who reads it has had enough.
        Err(error) if is_broken_pipe(&error) => Ok(0),
        done => done.map(|()| 0),
    }
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    let io = error.downcast_ref::<io::Error>();
    io.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

async fn show(args: &LogsArgs, entry: &Entry) -> anyhow::Result<()> {
    let path = entry.log();
    // Watched before it is read: nothing is missed in between.
    let watched = args.follow.then(|| watch(&path)).transpose()?;
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).context("cannot open the log"),
    };
    let mut reader = Reader {
        file: BufReader::new(file),
        begun: Vec::new(),
    };
    let skip = match args.tail {
        Some(wanted) => lines_taken(args, &path)?.saturating_sub(wanted),
        None => 0,
    };
    let mut taken = 0;
    let mut copy = |reader: &mut Reader| -> anyhow::Result<()> {
        while let Some(line) = reader.next()? {
            let Some(line) = parse_line(&line).filter(|line| args.takes(line)) else {
                continue;
            };
            taken += 1;
            if taken > skip {
                args.print(&line)?;
            }
        }
        Ok(io::stdout().flush()?)
    };
    copy(&mut reader)?;
    let Some(watched) = watched else {
        return Ok(());
    };
    let state = State::of(entry).await?;
    let Some(client) = state.client() else {
        return copy(&mut reader);
    };
    let ended = entry.ended(client);
    tokio::pin!(ended);
    loop {
        tokio::select! {
            changed = watched.readable() => {
                let mut changed = changed?;
                drain(watched.get_ref())?;
                changed.clear_ready();
                copy(&mut reader)?;
            }
            _ = &mut ended => return copy(&mut reader),
        }
    }
}

fn lines_taken(args: &LogsArgs, path: &std::path::Path) -> anyhow::Result<usize> {
    let mut reader = Reader {
        file: BufReader::new(File::open(path)?),
        begun: Vec::new(),
    };
    let mut count = 0;
    while let Some(line) = reader.next()? {
        count += usize::from(parse_line(&line).is_some_and(|line| args.takes(&line)));
    }
    Ok(count)
}

pub(super) fn watch(path: &std::path::Path) -> anyhow::Result<AsyncFd<OwnedFd>> {
    let flags = inotify::CreateFlags::CLOEXEC | inotify::CreateFlags::NONBLOCK;
    let watched = inotify::init(flags).context("cannot watch files")?;
    inotify::add_watch(&watched, path, inotify::WatchFlags::MODIFY)
        .with_context(|| format!("cannot watch {}", path.display()))?;
    Ok(readable(watched)?)
}

/// Takes what the kernel has to say: that something changed is all that counts.
pub(super) fn drain(watched: &OwnedFd) -> io::Result<()> {
    match rustix::io::read(watched, &mut [0; 4096]) {
        Err(error) if error != rustix::io::Errno::WOULDBLOCK => Err(error.into()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_log_are_taken_apart() {
        let line = parse_line(b"2026-01-31T12:00:00.5Z stderr P some  text\n").unwrap();
        let expected = Line {
            time: "2026-01-31T12:00:00.5Z",
            is_stderr: true,
            is_whole: false,
            text: b"some  text",
        };
        assert_eq!(line, expected);
        assert_eq!(parse_line(b"T stdout F \n").unwrap().text, b"");
        for bad in [b"".as_slice(), b"\n", b"T stdout\n", b"\xff stdout F x\n"] {
            assert_eq!(parse_line(bad), None);
        }
    }

    #[test]
    fn times_are_ages_or_dates() {
        let then = parse_time("1m").unwrap();
        let minute = SystemTime::now().duration_since(then).unwrap();
        assert!(minute >= Duration::from_secs(60) && minute < Duration::from_secs(120));
        assert!(parse_time("2026-01-31T12:00:00Z").is_ok());
        assert_eq!(parse_time("0").unwrap(), SystemTime::UNIX_EPOCH);
        assert!(parse_time("yesterday").is_err());
    }
}

//! What commands read: this process's stdin.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::{Errno, read};

/// This process's stdin, without a buffer. If another program has made the file that both share
/// non-blocking, it is waited for.
#[derive(Debug)]
pub(super) struct Stdin;

impl io::Read for Stdin {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        read_from(io::stdin().as_fd(), buffer)
    }
}

fn read_from(file: BorrowedFd<'_>, buffer: &mut [u8]) -> io::Result<usize> {
    loop {
        match read(file, &mut *buffer) {
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                match poll(&mut [PollFd::from_borrowed_fd(file, PollFlags::IN)], None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            done => return Ok(done?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write as _;
    use std::thread;
    use std::time::Duration;

    use rustix::io::ioctl_fionbio;

    #[test]
    fn a_file_that_another_program_has_made_non_blocking_is_waited_for() {
        let (reader, mut writer) = io::pipe().unwrap();
        ioctl_fionbio(&reader, true).unwrap();
        let types = thread::spawn(move || {
            thread::sleep(Duration::from_millis(50));
            writer.write_all(b"late").unwrap();
            thread::sleep(Duration::from_millis(50));
        });
        let mut buffer = [0; 16];
        assert_eq!(read_from(reader.as_fd(), &mut buffer).unwrap(), 4);
        assert_eq!(read_from(reader.as_fd(), &mut buffer).unwrap(), 0);
        types.join().unwrap();
    }
}

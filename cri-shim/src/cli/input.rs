//! What commands read: this process's stdin.

use std::io;
use std::os::fd::AsFd as _;

use crate::sandbox::read_from;

/// This process's stdin, without a buffer. If another program has made the file that both share
/// non-blocking, it is waited for.
#[derive(Debug)]
pub(super) struct Stdin;

impl io::Read for Stdin {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        Ok(read_from(io::stdin().as_fd(), buffer)?)
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

//! A Secret with a certificate, mounted as a directory: by `tls.crt` and `tls.key` a program shows
//! who it is, and by `ca.crt` it knows others.

use std::error::Error;
use std::path::{Path, PathBuf};

use tokio_rustls::rustls::RootCertStore;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject as _};

/// A file that cannot be used.
#[derive(Debug)]
pub(crate) struct Unusable {
    pub(crate) path: PathBuf,
    pub(crate) source: Box<dyn Error + Send + Sync>,
}

impl Unusable {
    /// Says of an error which file it is about.
    pub(crate) fn of<E: Error + Send + Sync + 'static>(path: &Path) -> impl FnOnce(E) -> Self {
        let path = path.to_owned();
        move |source| Self {
            path,
            source: Box::new(source),
        }
    }
}

/// The files of one directory.
#[derive(Debug)]
pub(crate) struct Files {
    directory: PathBuf,
}

impl Files {
    pub(crate) fn new(directory: &Path) -> Self {
        let directory = directory.to_owned();
        Self { directory }
    }

    /// The file with the own certificate.
    pub(crate) fn own(&self) -> PathBuf {
        self.directory.join("tls.crt")
    }

    /// Reads the own certificate, the authorities' after it, and its key.
    pub(crate) fn read_own(
        &self,
    ) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), Unusable> {
        let key = self.directory.join("tls.key");
        let private = PrivateKeyDer::from_pem_file(&key).map_err(Unusable::of(&key))?;
        Ok((read(&self.own())?, private))
    }

    /// The file with the authorities by which others are known.
    pub(crate) fn authorities(&self) -> PathBuf {
        self.directory.join("ca.crt")
    }

    /// Reads these authorities.
    pub(crate) fn read_authorities(&self) -> Result<RootCertStore, Unusable> {
        let path = self.authorities();
        let mut roots = RootCertStore::empty();
        for certificate in read(&path)? {
            roots.add(certificate).map_err(Unusable::of(&path))?;
        }
        Ok(roots)
    }
}

fn read(path: &Path) -> Result<Vec<CertificateDer<'static>>, Unusable> {
    let all = CertificateDer::pem_file_iter(path).map_err(Unusable::of(path))?;
    all.collect::<Result<_, _>>().map_err(Unusable::of(path))
}

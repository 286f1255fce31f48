//! Removal of containers, with everything that they held.

use super::error::{ContainerError, Result};
use super::files::directory::remove_directory;
use super::files::rootfs::Rootfs;
use super::lock::lock;
use super::table::{Container, Containers, Slot, run_to_end};

impl Containers {
    /// Kills what is left of a container and frees what it held. A container that does not exist
    /// counts as deleted. Returns the serials of the images that nothing uses any more.
    ///
    /// # Errors
    ///
    /// [`ContainerError`] if processes do not end; the container is kept then.
    pub async fn delete(&self, id: &str) -> Result<Vec<String>> {
        let container = {
            let mut table = self.lock();
            let Some(slot) = table.slots.get_mut(id) else {
                return Ok(Vec::new());
            };
            let Slot::Ready(container) = std::mem::replace(slot, Slot::Busy) else {
                return Err(ContainerError::WrongState {
                    id: id.to_owned(),
                    state: "busy",
                });
            };
            container
        };
        let (this, id) = (self.clone(), id.to_owned());
        run_to_end(async move {
            match this.free(&container).await {
                Ok(released) => {
                    this.lock().slots.remove(&id);
                    Ok(released)
                }
                Err(error) => {
                    this.lock().slots.insert(id, Slot::Ready(container));
                    Err(error)
                }
            }
        })
        .await
    }

    /// Frees what a container holds whose process has ended; its exit status stays known. A
    /// container that does not exist, or was released before, is not an error.
    ///
    /// # Errors
    ///
    /// [`ContainerError`] of kind `WrongState` if its process has not ended; another one if
    /// processes that it left behind do not end.
    pub async fn release(&self, id: &str) -> Result<()> {
        let container = match self.get(id) {
            Err(ContainerError::NotFound(_)) => return Ok(()),
            found => found?,
        };
        if !container.init.has_ended() {
            return Err(ContainerError::WrongState {
                id: id.to_owned(),
                state: "running",
            });
        }
        let this = self.clone();
        run_to_end(async move {
            container.keep_oom_kill();
            this.free(&container).await.map(drop)
        })
        .await
    }

    /// Ends what is left of a container, and returns the serials of the images that nothing uses
    /// any more. May be repeated.
    async fn free(&self, container: &Container) -> Result<Vec<String>> {
        let destroyed = container.cgroup.destroy().await;
        destroyed.map_err(|source| ContainerError::Io {
            action: "end the container's processes",
            source,
        })?;
        // Taken out of the container, which others may still hold for a moment.
        drop(std::mem::take(&mut *lock(&container.bound)));
        drop(std::mem::take(&mut *lock(&container.held)));
        let rootfs = lock(&container.rootfs).take();
        let mut images = std::mem::take(&mut *lock(&container.volumes));
        images.extend(rootfs.map(Rootfs::unmount));
        let mut released = Vec::new();
        for image in images {
            released.extend(self.shared.images.release(image).await);
        }
        remove_directory(&self.state_of(container));
        Ok(released)
    }

    /// Deletes every container.
    pub async fn delete_all(&self) {
        let ids: Vec<String> = self.lock().slots.keys().cloned().collect();
        for id in ids {
            if let Err(error) = self.delete(&id).await {
                tracing::warn!(%id, %error, "cannot delete a container");
            }
        }
    }
}

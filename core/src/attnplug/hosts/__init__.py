"""Host engines that run their attention through attnplug: a folder each, imported only where its engine is used."""

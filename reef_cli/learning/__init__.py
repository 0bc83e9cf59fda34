"""The recipe contract, batch building, the job state machine and scheduling across scenarios. No particular method."""

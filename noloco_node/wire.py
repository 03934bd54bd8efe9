"""Messages to bytes and back; limits are known before any memory is taken.

A stream carries frames: one byte of kind, four bytes of header length, eight bytes of body length (big endian), a
MessagePack header, then the raw bytes of the message's tensors, one after the other.

    MESSAGE  header: the message's name, its scalar fields, and dtype and shape of each tensor; body: the tensors
    BEAT     empty: I am alive and still at it
    ERROR    header: a sentence; the stream ends
    END      empty: a polite end; a stream that closes without it broke
"""

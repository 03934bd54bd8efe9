"""The command line, in the process of the test."""

from typer.testing import CliRunner

from noloco_node.cli.main import app
from noloco_node.errors import Exit, UserError


def printed(*words: object) -> str:
    """Run a command that succeeds; return what it prints."""
    done = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert done.exit_code == Exit.OK, done.output
    return done.stdout


def refused(*words: object, code: Exit = Exit.CONFIG) -> UserError:
    """Run a command that is refused with an exit code; return what is said."""
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert isinstance(done.exception, UserError), done.output
    assert done.exception.code is code
    return done.exception

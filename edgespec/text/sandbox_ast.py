"""Adds guards to a template's syntax tree: checks of the time, and measurements of the values it builds."""

from __future__ import annotations

from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.visitor import NodeTransformer


class GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; its contents are rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012 (declared this way by Jinja)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Guards(NodeTransformer):
    """Adds a check of the time to loops, and a measurement to expressions that build values."""

    def _add_measure(self, node: nodes.Expr) -> nodes.Expr:
        self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":  # the left side of `set a, b = ...`
            return node
        return nodes.Filter(node, "measure", [], [], None, None, lineno=node.lineno)

    visit_Concat = visit_List = visit_Tuple = visit_Dict = _add_measure

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        line = node.lineno
        node.body.insert(0, nodes.ExprStmt(_tick(line), lineno=line))
        if node.test is not None:
            node.test = nodes.And(_tick(line), node.test, lineno=line)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Const:
        return nodes.Const(node.data, lineno=node.lineno)  # an expression, so that `finalize` counts it


def _tick(line: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute("tick", lineno=line)
    return nodes.Call(function, [], [], None, None, lineno=line)
